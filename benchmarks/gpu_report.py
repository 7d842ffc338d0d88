"""The GPU benchmark's results as tables, JSON and a plot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common import Spread, markdown

LARGE_BARS = {1024: 0.90, 4096: 0.92, 16384: 0.95, 65536: 0.95}  # of the copy's rate
SMALL_BAR = 1.15  # times the copy
HOST_BAR = 1.3  # times the empty op
SMALL = 64  # tokens, at most
JUDGED = ("Llama-3-8B", "bfloat16")  # the bars are for this shape and dtype

GRAPH, HOT, SINGLE, SINGLE_HOT, PLAIN = "graph", "graph, hot", "one node", "one node, hot", "plain"


@dataclass
class Row:
    """What one peer took in one way of measuring: seconds, and ratios within rounds."""

    shape: str
    dtype: str
    num_tokens: int
    peer: str
    in_place: bool
    mode: str
    bytes: int
    candidate: str  # the fastest, which the times are of
    candidates: int  # so many were tried
    error: float  # of q_rot and k_rot
    seconds: Spread
    copy_over_peer: Spread  # the copy in the same rounds, in place if the peer is

    @property
    def is_judged(self) -> bool:
        return (self.shape, self.dtype) == JUDGED


@dataclass
class Results:
    device: str
    versions: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    nodes: dict[str, Spread] = field(default_factory=dict)  # an empty kernel, by mode
    host: dict[str, Spread] = field(default_factory=dict)  # seconds of a call at num_tokens 1
    host_ratios: dict[str, Spread] = field(default_factory=dict)  # to the empty op's, within rounds
    notes: list[str] = field(default_factory=list)

    def write_json(self, path: Path) -> None:
        spreads = ("seconds", "copy_over_peer")
        plain = asdict(self)
        for row, source in zip(plain["rows"], self.rows, strict=True):
            row.update({name: getattr(source, name)._asdict() for name in spreads})
            row["gigabytes_per_second"] = source.bytes / source.seconds.median / 1e9
        for name in ("nodes", "host", "host_ratios"):
            plain[name] = {key: value._asdict() for key, value in getattr(self, name).items()}
        path.write_text(json.dumps(plain, indent=1) + "\n")


def write(results: Results, folder: Path) -> None:
    """Prints the tables, and writes them, the JSON and the plot."""
    results.notes.append(plot(results, folder / "plot.png"))
    results.write_json(folder / "results.json")
    text = "\n\n".join(tables(results))
    (folder / "tables.md").write_text(text + "\n")
    print(text)


def tables(results: Results) -> Iterator[str]:
    """One table a question, the bars last."""
    yield f"{results.device}, {', '.join(f'{name} {version}' for name, version in results.versions.items())}"
    yield from results.notes
    yield (
        "Is anything faster? Nodes of a graph, cold, µs (medians). Each form against its own.\n"
        + alternatives(results.rows)
    )
    yield "And without a graph? Plain launches, µs (medians).\n" + plain_launches(results.rows)
    yield (
        "How near is the op to the copy? Nodes of a graph, cold: medians (middle halves).\n"
        + against_copy(results.rows)
    )
    yield (
        f"And at T <= {SMALL}? Op / copy, µs, and the ratio; in graphs of 200 nodes and of one.\n"
        + small(results.rows)
    )
    yield "An empty kernel, µs: " + ", ".join(f"{mode} {time.text()}" for mode, time in results.nodes.items())
    yield (
        "What does a call from Python cost the host at T = 1? The empty op has the op's signature and "
        "launches an empty kernel; fresh, it allocates the outputs too.\n" + host(results)
    )
    yield f"The bars, for {', '.join(JUDGED)}.\n" + bars(results)


def alternatives(rows: list[Row]) -> str:
    def faster(times: Times) -> str:
        return "; ".join(peer for peer, margin in margins(times).items() if margin <= 1)

    return by_peer(rows, GRAPH, {"faster than the op": faster})


def plain_launches(rows: list[Row]) -> str:
    return by_peer(rows, PLAIN, {})


def by_peer(rows: list[Row], mode: str, more: dict[str, Callable[[Times], str]]) -> str:
    """A line a problem, a column a peer, and what more there is to say."""
    rows = [row for row in rows if row.mode == mode]
    peers = list(dict.fromkeys(row.peer for row in rows))
    lines = []
    for key, times in by_problem(rows).items():
        cells = [f"{1e6 * times[peer].seconds.median:.2f}" if peer in times else "" for peer in peers]
        lines.append([*key, *cells, *(say(times) for say in more.values())])
    return markdown(" | ".join(["shape", "dtype", "T", *peers, *more]), lines)


def against_copy(rows: list[Row]) -> str:
    lines = []
    for key, times in by_problem([row for row in rows if row.mode == GRAPH]).items():
        for row in ops(times):
            copy = counterpart(times, row, "copy")
            rate = f"{row.bytes / row.seconds.median / 1e9:.0f}"
            ratio = row.copy_over_peer.text(1, 3)
            lines.append(
                [*key, row.peer, row.seconds.text(), copy.seconds.text(), rate, ratio, copy.candidate]
            )
    return markdown("shape | dtype | T | form | op, µs | copy, µs | GB/s | copy / op | the copy", lines)


def small(rows: list[Row]) -> str:
    modes = (GRAPH, HOT, SINGLE, SINGLE_HOT)
    small_rows = [row for row in rows if row.num_tokens <= SMALL]
    by_mode = {mode: by_problem([row for row in small_rows if row.mode == mode]) for mode in modes}
    lines = []
    for key, times in by_mode[GRAPH].items():
        for op in ops(times):
            cells = []
            for mode in modes:
                row = by_mode[mode][key][op.peer]
                copy = counterpart(by_mode[mode][key], row, "copy")
                two = f"{1e6 * row.seconds.median:.2f} / {1e6 * copy.seconds.median:.2f}"
                cells.append(f"{two}, {1 / row.copy_over_peer.median:.2f}")
            lines.append([*key, op.peer, *cells])
    return markdown("shape | dtype | T | form | 200 nodes | 200 nodes, hot | one node | one node, hot", lines)


def host(results: Results) -> str:
    return markdown(
        "call | µs | ratio to the empty op",
        [
            [name, time.text(), results.host_ratios[name].text(1, 2) if name in results.host_ratios else ""]
            for name, time in results.host.items()
        ],
    )


def bars(results: Results) -> str:
    lines = []

    def add(what: str, value: float, bar: float, passed: bool) -> None:
        lines.append([what, f"{value:.3f}", f"{bar:.2f}", "pass" if passed else "MISSED"])

    for row in results.rows:
        if not row.is_judged or not row.peer.startswith("op"):
            continue
        ratio = row.copy_over_peer.median
        what = f"{row.peer}, T = {row.num_tokens}, {row.mode}"
        if row.num_tokens <= SMALL and row.mode != PLAIN:
            add(f"{what}: op / copy", 1 / ratio, SMALL_BAR, 1 / ratio <= SMALL_BAR)
        if row.num_tokens in LARGE_BARS and row.mode == GRAPH:
            bar = LARGE_BARS[row.num_tokens]
            add(f"{what}: copy / op", ratio, bar, ratio >= bar)
    for name, spread in results.host_ratios.items():
        if name.startswith("op"):
            add(f"{name}, on the host: op / empty op", spread.median, HOST_BAR, spread.median <= HOST_BAR)
    for key, times in by_problem([row for row in results.rows if row.mode == GRAPH]).items():
        if key[:2] == JUDGED and margins(times):
            peer, margin = min(margins(times).items(), key=lambda item: item[1])
            add(f"T = {key[2]}, graph: fastest alternative ({peer}) / op", margin, 1, margin > 1)
    return markdown("what | is | bar | verdict", lines)


Times = dict[str, Row]  # by peer


def by_problem(rows: list[Row]) -> dict[tuple[str, str, str], Times]:
    found: dict[tuple[str, str, str], Times] = {}
    for row in rows:
        found.setdefault((row.shape, row.dtype, str(row.num_tokens)), {})[row.peer] = row
    return found


def ops(times: Times) -> list[Row]:
    return [row for row in times.values() if row.peer.startswith("op")]


def counterpart(times: Times, row: Row, name: str) -> Row:
    return times[f"{name}, {'in place' if row.in_place else 'fresh'}"]


def margins(times: Times) -> dict[str, float]:
    """Of each alternative: its time over that of the op in its form."""
    return {
        row.peer: row.seconds.median / counterpart(times, row, "op").seconds.median
        for row in times.values()
        if not row.peer.startswith(("op", "copy"))
    }


def plot(results: Results, path: Path) -> str:
    """One panel for each shape and dtype. Says what became of it."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in results.rows if row.mode == GRAPH and not row.peer.startswith("copy")]
    panels = list(dict.fromkeys((row.shape, row.dtype) for row in rows))
    if not panels:
        return "no plot: nothing was measured"
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(5.5 * columns, 4 * lines), squeeze=False, layout="constrained"
    )
    colors = {peer: f"C{i}" for i, peer in enumerate(dict.fromkeys(row.peer for row in rows))}
    for axis, panel in zip(axes.flat, panels, strict=False):
        for peer, color in colors.items():
            own = [row for row in rows if (row.shape, row.dtype, row.peer) == (*panel, peer)]
            if own:
                low, middle, high = zip(*(row.copy_over_peer for row in own), strict=True)
                tokens = [row.num_tokens for row in own]
                axis.plot(tokens, middle, marker=".", label=peer, color=color)
                axis.fill_between(tokens, low, high, color=color, alpha=0.2)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.axhline(1, color="black", linewidth=0.5)
        axis.set(title=", ".join(panel), xlabel="tokens", ylabel="fraction of the copy's rate")
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    axes[0, 0].legend(fontsize="small")
    figure.suptitle(f"{results.device}: nodes of a CUDA graph, cold")
    figure.savefig(path, dpi=120)
    return f"plot: {path}"
