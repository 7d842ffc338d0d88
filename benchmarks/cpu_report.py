"""The CPU benchmark's results as tables, JSON, plots, and a block of the README."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import Spread, markdown

ROOT = Path(__file__).parent.parent
KEPT = Path("benchmarks/results")  # what the README shows, from ROOT
BEGIN, END = "<!-- bench_cpu: begin -->", "<!-- bench_cpu: end -->"
NOT_MEASURED = "Not measured yet: `make bench` writes the figures here."

COLD, HOT = "cold", "hot"
OP, FLOOR, EMPTY = "op", "floor", "empty op"
FRESH, IN_PLACE = "fresh", "in place"

LARGE_BAR = 1.15  # times the floor, in place, for JUDGED at LARGE tokens and more
JUDGED, LARGE = ("Llama-3-8B", "bfloat16"), 512
OTHER_BAR = 1.3  # times the floor or the hot arithmetic, at 64 tokens and more
SMALL_BAR, SMALL = 1.3, 8  # times the floor, at so few tokens
PEER_BAR = 1.8  # times as fast as the fastest peer, in place
FRESH_PEERS = 512  # tokens, up to which fresh outputs are to be faster than every peer
BUSY = 0.1  # cores
THREADS_BAR = 1.05  # times one thread's time: what is beyond is no noise


@dataclass
class Row:
    """What one peer took: seconds, and ratios within rounds."""

    shape: str
    dtype: str
    num_tokens: int
    threads: int
    peer: str
    in_place: bool
    mode: str
    bytes: int
    candidate: str  # the fastest, which the times are of
    error: float  # of a head of q_rot and k_rot, relative
    tolerance: float
    why: str
    hot_tokens: int  # of the hot mode
    rounds: int
    seconds: Spread
    over_floor: Spread  # of the same form
    over_single: Spread  # the same at one thread

    @property
    def is_peer(self) -> bool:
        return self.mode == COLD and not self.peer.startswith((OP, FLOOR, EMPTY, "Python function"))


@dataclass
class Accuracy:
    """The largest error of cos and sin at the positions below one."""

    position: int
    op: float
    float32: float


@dataclass
class Scaling:
    """What a token costs the op in place where one size changes, and the floor."""

    series: str
    at: int
    num_tokens: int
    threads: int
    seconds: Spread  # of a call
    over_floor: Spread


@dataclass
class Results:
    machine: str
    versions: dict[str, str]
    isa: str  # of the op
    command: str = ""
    others: float = 0.0  # cores that other processes took meanwhile
    pools: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    accuracy: list[Accuracy] = field(default_factory=list)
    scaling: list[Scaling] = field(default_factory=list)

    def write_json(self, path: Path) -> None:
        """A line a row."""
        plain = asdict(self)
        lists = {name: plain.pop(name) for name in ("rows", "accuracy", "scaling")}
        text = json.dumps(plain, indent=1).removesuffix("\n}")
        for name, rows in lists.items():
            lines = ",\n".join("  " + json.dumps(rounded(row)) for row in rows)
            text += f',\n "{name}": [\n{lines}\n ]'
        path.write_text(text + "\n}\n")

    @staticmethod
    def read_json(path: Path) -> Results:
        plain = json.loads(path.read_text())
        spreads = ("seconds", "over_floor", "over_single")

        def made(kind: Callable[..., Any], row: dict[str, Any]) -> Any:
            return kind(**{k: Spread(*v) if k in spreads else v for k, v in row.items()})

        for name, kind in (("rows", Row), ("accuracy", Accuracy), ("scaling", Scaling)):
            plain[name] = [made(kind, row) for row in plain[name]]
        return Results(**plain)

    def about(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        others = f"other processes took {self.others:.2f} cores meanwhile"
        if self.others > BUSY:
            others += ": too busy a machine for these times to mean much"
        return f"{self.machine} ({others}); the op runs its {self.isa} kernel; {versions}"


def rounded(value: Any) -> Any:
    """Five digits of each float: more is noise."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


# ---- What the rows say


@dataclass
class Case:
    """The rows of one shape, dtype, number of tokens and of threads."""

    shape: str
    dtype: str
    num_tokens: int
    threads: int
    rows: list[Row]

    @property
    def names(self) -> list[str]:
        return [self.shape, self.dtype, str(self.num_tokens), str(self.threads)]

    def row(self, what: str, form: str, mode: str = COLD) -> Row:
        return next(row for row in self.rows if row.peer == f"{what}, {form}" and row.mode == mode)

    def hot_seconds(self) -> float:
        """The kernel's own arithmetic for so many tokens; the call's cost counted once."""
        hot = self.row(OP, IN_PLACE, HOT)
        call = self.row(EMPTY, IN_PLACE).seconds.median
        return call + (hot.seconds.median - call) * self.num_tokens / hot.hot_tokens

    def over_hot(self, row: Row) -> float:
        return row.seconds.median / self.hot_seconds()

    def fastest_peer(self) -> Row | None:
        return min((r for r in self.rows if r.is_peer), key=lambda r: r.seconds.median, default=None)


def cases(results: Results) -> list[Case]:
    found: dict[tuple[Any, ...], Case] = {}
    for row in results.rows:
        key = (row.shape, row.dtype, row.num_tokens, row.threads)
        found.setdefault(key, Case(*key, [])).rows.append(row)
    return list(found.values())


@dataclass
class Verdict:
    bar: str
    case: list[str]
    value: float
    limit: float
    at_least: bool  # the limit is
    detail: str

    @property
    def passed(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def margin(self) -> float:
        """Below 1: missed."""
        return self.value / self.limit if self.at_least else self.limit / self.value


def verdicts(results: Results) -> Iterator[Verdict]:
    for case in cases(results):
        for form in (FRESH, IN_PLACE):
            row = case.row(OP, form)
            yield _floor_verdict(case, row, form)
            yield from _peer_verdicts(case, row, form)
            if case.threads > 1:
                ratio = row.over_single
                name = f"{form}: more threads' time, of one thread's, at most"
                yield Verdict(name, case.names, ratio.median, THREADS_BAR, False, ratio.text(1))


def _floor_verdict(case: Case, row: Row, form: str) -> Verdict:
    ratio = row.over_floor
    value, detail = ratio.median, f"{ratio.text(1)} of the floor"
    if case.num_tokens <= SMALL:
        bar, limit = f"{form}, T <= {SMALL}: of the empty op's call with the copy, at most", SMALL_BAR
    elif form == IN_PLACE and (case.shape, case.dtype) == JUDGED and case.num_tokens >= LARGE:
        bar, limit = f"{form}, {' '.join(JUDGED)}, T >= {LARGE}: of the floor, at most", LARGE_BAR
    else:
        bar, limit = f"{form}, else T >= 64: of the floor or the hot arithmetic, at most", OTHER_BAR
        value = min(value, case.over_hot(row))
        detail += f", {case.over_hot(row):.2f} of the hot arithmetic"
    return Verdict(bar, case.names, value, limit, False, detail)


def _peer_verdicts(case: Case, row: Row, form: str) -> Iterator[Verdict]:
    peer = case.fastest_peer()
    if peer is None or (form == FRESH and case.num_tokens > FRESH_PEERS):
        return
    times = peer.seconds.median / row.seconds.median
    if form == IN_PLACE:
        name, limit = f"{form}: times as fast as the fastest peer, at least", PEER_BAR
    else:
        name, limit = f"{form}, T <= {FRESH_PEERS}: times as fast as the fastest peer, at least", 1.0
    yield Verdict(name, case.names, times, limit, True, f"{peer.peer}, {1e6 * peer.seconds.median:.1f} µs")


# ---- Tables


def tables(results: Results) -> Iterator[str]:
    """One table a question, the bars last."""
    yield results.about()
    yield "Pools: " + "; ".join(f"{name}: {size}" for name, size in results.pools.items())
    if results.notes:
        yield "\n".join(f"- {note}" for note in results.notes)
    if results.rows:
        yield "Everything, µs of a call: medians (middle halves).\n" + everything(results)
        yield "How far are the answers from float64's? Of a head, relative.\n" + errors(results)
        yield "The bars, met and missed.\n" + bar_summary(results) + "\n\n" + bar_lines(results)
    if results.scaling:
        yield "What a token costs, in place, one size changing.\n" + scaling_lines(results.scaling)
        yield "\n".join(scaling_words(results.scaling))


def everything(results: Results) -> str:
    lines = []
    for case in cases(results):
        for row in case.rows:
            name = row.peer if row.mode == COLD else f"{row.peer}, hot, {row.hot_tokens} tokens"
            rate = f"{row.bytes / row.seconds.median / 1e9:.1f}" if row.mode == COLD else ""
            ratio = row.over_floor.text(1) if row.mode == COLD else ""
            lines.append([*case.names, name, row.seconds.text(), rate, ratio, row.candidate])
    return markdown("shape | dtype | T | threads | what | µs | GB/s | of the floor | the copy", lines)


def errors(results: Results) -> str:
    found: dict[tuple[str, str], Row] = {}
    for row in results.rows:
        if row.mode == COLD and row.tolerance:
            key = (row.peer, row.dtype)
            found[key] = max(row, found.get(key, row), key=lambda r: r.error)
    lines = [
        [peer, dtype, f"{row.error:.1e}", f"{row.tolerance:.1e}", row.why]
        for (peer, dtype), row in found.items()
    ]
    return markdown("what | dtype | largest error | allowed | for", lines)


def bar_summary(results: Results) -> str:
    bars: dict[str, list[Verdict]] = {}
    for verdict in verdicts(results):
        bars.setdefault(verdict.bar, []).append(verdict)
    lines = []
    for bar, found in bars.items():
        worst = min(found, key=lambda v: v.margin)
        met = f"{sum(v.passed for v in found)} of {len(found)}"
        where = (
            f"{worst.value:.2f} at {', '.join(worst.case[:2])}, T = {worst.case[2]}, {worst.case[3]} threads"
        )
        lines.append([bar, f"{worst.limit:.2f}", met, where])
    return markdown("bar | limit | met | the worst", lines)


def bar_lines(results: Results) -> str:
    lines = [
        [v.bar, *v.case, f"{v.value:.2f}", f"{v.limit:.2f}", "met" if v.passed else "MISSED", v.detail]
        for v in verdicts(results)
    ]
    return markdown("bar | shape | dtype | T | threads | is | bar | verdict | detail", lines)


def scaling_lines(scaling: list[Scaling]) -> str:
    lines = []
    for row in scaling:
        sizes = [str(n) for n in (row.at, row.num_tokens, row.threads)]
        token = f"{1e9 * row.seconds.median / row.num_tokens:.1f}"
        lines.append([row.series, *sizes, token, row.over_floor.text(1)])
    return markdown("over | at | T | threads | ns a token | of the floor", lines)


def scaling_words(scaling: list[Scaling]) -> Iterator[str]:
    """Of a token's cost, and of that in copies, the last of each series over an early one."""
    for name, early, says in (
        ("num_tokens", 1024, "linear, if a token costs the same"),
        ("pool_size", 2**18, "flat, if a token costs the same: from 2^18 rows on no cache holds the pools"),
        ("head_dim", 64, "linear, if a feature costs the same"),
        ("threads", 1, "what more threads leave of a token's time"),
    ):
        own = [row for row in scaling if row.series == name]
        first = next((row for row in own if row.at == early), None)
        if first is None or own[-1] is first:
            continue
        last = own[-1]
        size = last.at / first.at if name == "head_dim" else 1
        cost = last.seconds.median / last.num_tokens / (first.seconds.median / first.num_tokens) / size
        floor = last.over_floor.median / first.over_floor.median
        yield (
            f"- {name}, {last.at} over {first.at}: {cost:.2f}, {floor:.2f} in multiples of the floor ({says})"
        )


# ---- The README's block


def readme_block(results: Results) -> str:
    """What stands between the markers. Made from the JSON alone: a test makes it again."""
    lines = []
    for case in cases(results):
        peer = case.fastest_peer()
        cells = [f"{case.shape}, {case.dtype}", str(case.num_tokens), str(case.threads)]
        for form in (IN_PLACE, FRESH):
            row = case.row(OP, form)
            cells += [f"{1e6 * row.seconds.median:.1f}", f"{row.over_floor.median:.2f}"]
            cells += [f"{case.over_hot(row):.2f}"] if form == IN_PLACE else []
            cells += [f"{row.over_single.median:.2f}" if case.threads > 1 else ""]
            cells += [f"{peer.seconds.median / row.seconds.median:.1f}" if peer else ""]
        lines.append([*cells, peer.peer if peer else ""])
    header = (
        "shape, dtype | T | threads | in place, µs | / floor | / hot | / one thread | fastest peer / it | "
        "fresh, µs | / floor | / one thread | fastest peer / it | the fastest peer"
    )
    notes = "".join(f"\n- {note}" for note in dict.fromkeys(results.notes))
    parts = [
        f"Made by `{results.command}` on {results.about()}.",
        "Medians of a call, inputs out of the second cache, pool rows cold. The floor is the call of an op "
        "of the same signature that copies the same bytes between the same rows, by the best of 16 kinds "
        "of copy: at few tokens, an empty op's call and the copy. Hot is the op's own arithmetic, on inputs "
        "and rows that the second cache holds.",
        markdown(header, lines),
        "Bars:\n\n" + bar_summary(results) + ("\n" + notes if notes else ""),
        "What a token costs, in place, 4 and 1 heads, bfloat16, one size changing:\n\n"
        + scaling_lines(results.scaling),
        "\n".join(scaling_words(results.scaling)),
        "\n".join(f"![{title}]({KEPT / name})" for name, title in PLOTS.items()),
    ]
    return "\n\n".join(parts)


def with_block(readme: str, block: str) -> str:
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


def refresh_readme(results: Results, out: Path) -> None:
    folder = ROOT / KEPT
    folder.mkdir(exist_ok=True)
    kept = folder / "bench_cpu.json"
    results.write_json(kept)
    for name in PLOTS:
        shutil.copy(out / name, folder / name)
    readme = ROOT / "README.md"
    block = readme_block(Results.read_json(kept))  # the numbers as rounded there
    readme.write_text(with_block(readme.read_text(), block))


# ---- Plots


PLOTS = {
    "cpu_time.png": "Time of a call over the number of tokens",
    "cpu_floor.png": "Fraction of the floor over the number of tokens",
    "cpu_accuracy.png": "Error of cosines and sines over the position",
}


def write(results: Results, folder: Path) -> None:
    """Prints the tables, and writes them, the JSON and the plots."""
    if results.rows:
        results.notes += plots(results, folder)
    results.write_json(folder / "results.json")
    text = "\n\n".join(tables(results))
    (folder / "tables.md").write_text(text + "\n")
    print(text)


def plots(results: Results, folder: Path) -> list[str]:
    """Says why there are none."""
    try:
        import matplotlib
    except ImportError:
        return ["no plots: matplotlib is not installed"]
    matplotlib.use("Agg")
    _panels(results, folder / "cpu_time.png", "µs of a call", lambda row: 1e6 * row.seconds.median, True)
    _panels(
        results, folder / "cpu_floor.png", "fraction of the floor", lambda r: 1 / r.over_floor.median, False
    )
    _accuracy(results, folder / "cpu_accuracy.png")
    return []


def _panels(results: Results, path: Path, label: str, value: Callable[[Row], float], is_log: bool) -> None:
    """A panel for each shape and dtype, at the most threads."""
    from matplotlib import pyplot

    threads = max(row.threads for row in results.rows)
    rows = [
        r for r in results.rows if r.mode == COLD and r.threads == threads and not r.peer.startswith(EMPTY)
    ]
    panels = list(dict.fromkeys((row.shape, row.dtype) for row in rows))
    names = list(dict.fromkeys(row.peer for row in rows))
    columns = min(2, len(panels))
    height = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        height, columns, figsize=(5 * columns, 3.4 * height + 0.8), squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes.flat, panels, strict=False):
        for i, name in enumerate(names):
            own = [row for row in rows if (row.shape, row.dtype, row.peer) == (*panel, name)]
            style = "-" if name.startswith(OP) else "--" if name.startswith(FLOOR) else ":"
            axis.plot(
                [r.num_tokens for r in own],
                [value(r) for r in own],
                style,
                marker=".",
                color=f"C{i}",
                label=name,
            )
        axis.set(title=", ".join(panel), xlabel="tokens", ylabel=label, xscale="log")
        axis.set_yscale("log" if is_log else "linear")
        if not is_log:
            axis.set_ylim(0, 1.1)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    figure.suptitle(
        f"{results.machine}, threads: {threads}, torch {results.versions['torch']}", fontsize="medium"
    )
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """In few colours: these files are in the repository."""
    from matplotlib import pyplot
    from PIL import Image

    figure.savefig(path, dpi=80)
    pyplot.close(figure)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(64)
    small.save(path, optimize=True)


def _accuracy(results: Results, path: Path) -> None:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    positions = [point.position for point in results.accuracy]
    axis.plot(positions, [point.float32 for point in results.accuracy], marker=".", label="float32 angles")
    axis.plot(positions, [point.op for point in results.accuracy], marker=".", label="torch_ropepool")
    axis.set(xlabel="position", ylabel="largest error of cos and sin", xscale="log", yscale="log")
    axis.set_title(f"{results.machine}, torch {results.versions['torch']}", fontsize="small")
    axis.legend()
    _save(figure, path)
