"""Is the CUDA kernel as fast as a copy, and faster than what else does its job? One command answers.

`python benchmarks/bench_gpu.py` builds a plain copy of the same bytes between the same rows (the floor)
and an op that launches an empty kernel, checks every peer's answer, times all, prints tables, and writes
results.json, tables.md and plot.png into --out. `--quick`: the first shape and dtype in full, of the others
the op and the copy at three sizes, and fewer rounds. What no time was left for (--seconds) is named.

Peers: the op and the copy, with fresh outputs and in place; eager torch with cached cosines and sines;
torch.compile of that, and with the angles inside (the first shape and dtype of a full run with static
sizes, the rest with dynamic ones); a Triton kernel of the same job, and one that reads cosines and sines made
before and rounded to q's dtype, as eager torch does. Of the copy and of Triton's kernels
many variants are tried and the fastest few timed with the rest; the best of those counts.

Other projects' CUDA kernels too, where a checkout of theirs is given; nothing of theirs is in this tree.
Their tables of cosines and sines are made before, for all positions.

--flashinfer  RoPE, then the paged KV cache: two kernels, with the angles inside or a float32 table.
              v0.6.9 builds with CUDA 13.0; later ones want a newer CCCL (--include).
--sglang      One kernel for both, in place, with a float32 table; also as sglang launches it: a launch may
              begin before the one before it has ended. Wants tvm-ffi's headers (--include). v0.5.23 builds.
--vllm        RoPE in place, then the KV cache: two kernels, with a table of q's dtype. Wants cuBLAS's
              headers, from CUDA or --include. v0.33.0 builds.

Method: within a round every peer runs once; the tables have medians and middle halves of the rounds, and
ratios are taken within rounds. A time is of a node of a CUDA graph between two events, unless a table
says plain launches: those are a Python loop's. Cold: each node has its own inputs and outputs, of
together over twice the L2 cache, or else the cache is emptied before each replay. Hot: all nodes have the
same. Fresh outputs are allocated by the op, eager torch, torch.compile and Triton; the copy's are given.

The bars, for Llama-3-8B's shape in bfloat16: at least 95 % of the copy's rate at 65536 and 16384 tokens,
92 % at 4096, 90 % at 1024; at most 1.15 times the copy's time at T <= 64; a call from Python at T = 1
takes the host at most 1.3 times as long as one of the empty op; no alternative is faster.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import gpu_report as report
import torch
from common import DTYPES, SHAPES, Spread, bytes_of, interleave, spread
from gpu_peers import (
    Floor,
    Peer,
    Problem,
    build_libraries,
    check,
    compile_peers,
    eager_peers,
    host_calls,
    make_pools,
    make_problem,
    op_peers,
    triton_peers,
)
from gpu_report import GRAPH, HOT, PLAIN, SINGLE, SINGLE_HOT, SMALL, Results, Row
from gpu_timing import Call, Timer, host_seconds
from gpu_vendors import VENDORS, Builds, Wrapper

TOKENS = [1, 8, 64, 256, 1024, 4096, 16384, 65536]
QUICK_TOKENS = [1, 1024, 16384]  # of all but the first shape and dtype
PEERS = ("eager", "compile", "triton")
CHAIN = 200  # nodes, at T <= SMALL
SEARCH_CHAIN, SEARCH_ROUNDS, KEPT = 40, 3, 3

Candidates = dict[tuple[str, str], Call]  # by peer and candidate


class Bench:
    def __init__(
        self, options: argparse.Namespace, floor: Floor, vendors: list[Wrapper], notes: list[str]
    ) -> None:
        self.options = options
        self.rounds = 11 if options.quick else 21
        self.floor = floor
        self.vendors = vendors
        self.timer = Timer()
        self.notes = notes
        self.fastest: dict[tuple[object, ...], list[str]] = {}

    def peers(self, problem: Problem, is_first: bool) -> list[Peer]:
        in_full = is_first or not self.options.quick
        wanted = self.options.peers if in_full else []
        peers = [*op_peers(problem), *self.floor.peers(problem)]
        if "triton" in wanted:
            peers += triton_peers(problem)
        if "eager" in wanted:
            peers += eager_peers(problem)
        if "compile" in wanted:
            peers += compile_peers(problem, static=is_first and not self.options.quick)
        if in_full:
            for vendor in self.vendors:
                peers += vendor.peers(problem)
        return peers

    def measure(self, problem: Problem, peers: list[Peer]) -> Iterator[Row]:
        """Checks, then every mode."""
        calls: Candidates = {}
        errors = {}
        for peer in peers:
            try:
                for name in self.shortlist(problem, peer):
                    errors[peer.name, name] = check(problem, peer, peer.candidates[name])
                    self.replay(problem, peer.candidates[name], SINGLE, 1)
                    calls[peer.name, name] = peer.candidates[name]
            except Exception as error:
                if peer.is_required:
                    raise
                traceback.print_exc()
                what = f"{type(error).__name__}: {error}".splitlines()[0]
                self.notes.append(f"LEFT OUT: {peer.name}, {problem}: {what[:200]}")
        present = [peer for peer in peers if any(name == peer.name for name, _ in calls)]
        for mode in modes_of(problem):
            yield from rows_of(problem, present, mode, self.times(problem, calls, mode), errors)

    def shortlist(self, problem: Problem, peer: Peer) -> list[str]:
        """The fastest candidates, hot ones as well where T is small; searched for once an itemsize."""
        if len(peer.candidates) == 1:
            return list(peer.candidates)
        itemsize = DTYPES[problem.dtype].itemsize
        key = (problem.shape, itemsize, problem.num_tokens, peer.name)
        if key not in self.fastest:
            names: list[str] = []
            for mode in [GRAPH, HOT] if problem.num_tokens <= SMALL else [GRAPH]:
                seconds = {
                    name: statistics.median(self.replays(problem, call, mode))
                    for name, call in peer.candidates.items()
                }
                names += sorted(seconds, key=lambda name: seconds[name])[:KEPT]
            self.fastest[key] = list(dict.fromkeys(names))
            torch.cuda.empty_cache()
        return self.fastest[key]

    def times(self, problem: Problem, calls: Candidates, mode: str) -> dict[tuple[str, str], list[float]]:
        """Seconds of a call, of each candidate in each round."""
        if mode == PLAIN:
            count = 40 if problem.num_tokens <= 1024 else 4
            return interleave(
                {
                    name: partial(self.timer.plain_seconds, call, problem.inputs, count)
                    for name, call in calls.items()
                },
                self.rounds,
            )
        chain = chain_of(problem)
        return interleave(
            {name: self.replay(problem, call, mode, chain) for name, call in calls.items()}, self.rounds
        )

    def replays(self, problem: Problem, call: Call, mode: str) -> list[float]:
        """For the search: fewer nodes and rounds."""
        replay = self.replay(problem, call, mode, min(SEARCH_CHAIN, chain_of(problem)))
        return [replay() for _ in range(SEARCH_ROUNDS)]

    def replay(self, problem: Problem, call: Call, mode: str, chain: int) -> Callable[[], float]:
        """Replays one graph, and says how long a node took."""
        is_hot = mode in (HOT, SINGLE_HOT)
        nodes = 1 if mode in (SINGLE, SINGLE_HOT) else chain
        inputs = problem.inputs[: 1 if is_hot else nodes]
        graph = self.timer.capture(call, inputs, nodes)
        rinse = not is_hot and len(inputs) * problem.bytes < self.timer.cache_bytes
        return lambda: self.timer.replay_seconds(graph, rinse) / nodes

    def empty_nodes(self) -> dict[str, Spread]:
        """An empty kernel as one of a chain's nodes, alone, and launched plainly."""
        found = {}
        for name, nodes in ((f"node of {CHAIN}", CHAIN), ("one node", 1)):
            graph = self.timer.capture(self.floor.empty, [None], nodes)
            found[name] = spread(
                [self.timer.replay_seconds(graph, rinse=False) / nodes for _ in range(self.rounds)]
            )
        found["plain launch"] = spread(
            [self.timer.plain_seconds(self.floor.empty, [None], CHAIN) for _ in range(self.rounds)]
        )
        return found


def chain_of(problem: Problem) -> int:
    return CHAIN if problem.num_tokens <= SMALL else len(problem.inputs)


def modes_of(problem: Problem) -> Sequence[str]:
    return (GRAPH, HOT, SINGLE, SINGLE_HOT, PLAIN) if problem.num_tokens <= SMALL else (GRAPH, PLAIN)


def rows_of(
    problem: Problem,
    peers: list[Peer],
    mode: str,
    times: dict[tuple[str, str], list[float]],
    errors: dict[tuple[str, str], float],
) -> Iterator[Row]:
    """Of each peer's candidates the one with the smallest median."""
    best = {
        peer.name: min(
            (name for name in times if name[0] == peer.name), key=lambda name: spread(times[name]).median
        )
        for peer in peers
    }
    for peer in peers:
        own = times[best[peer.name]]
        copy = times[best["copy, in place" if peer.in_place else "copy, fresh"]]
        yield Row(
            problem.shape,
            problem.dtype,
            problem.num_tokens,
            peer.name,
            peer.in_place,
            mode,
            problem.bytes,
            candidate=best[peer.name][1],
            candidates=len(peer.candidates),
            error=errors[best[peer.name]],
            seconds=spread(own),
            copy_over_peer=spread([a / b for a, b in zip(copy, own, strict=True)]),
        )


def measure_host(results: Results, has_empty_op: bool, rounds: int) -> None:
    shape, dtype = report.JUDGED
    problem = make_problem(shape, dtype, 1, make_pools(shape, dtype), copies=1)
    calls = host_calls(problem, has_empty_op)
    for call in calls.values():
        call()
    times = interleave({name: partial(host_seconds, call) for name, call in calls.items()}, rounds)
    for name, own in times.items():
        results.host[name] = spread(own)
        empty = times.get("empty op, " + name.split(", ")[1])
        if empty is not None:
            results.host_ratios[name] = spread([a / b for a, b in zip(own, empty, strict=True)])


def versions() -> dict[str, str]:
    found = {"torch": torch.__version__, "CUDA": str(torch.version.cuda)}
    try:
        import triton
    except ImportError:
        return found
    return found | {"triton": triton.__version__}


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument(
        "--peers", nargs="*", default=list(PEERS), choices=PEERS, help="besides the op and the copy"
    )
    for vendor in VENDORS:
        parser.add_argument(f"--{vendor.stem}", type=Path, metavar="DIR", help=f"a checkout of {vendor.name}")
    parser.add_argument(
        "--include", type=Path, nargs="+", default=[], metavar="DIR", help="more headers for those"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, few sizes of most shapes")
    parser.add_argument("--seconds", type=float, default=480, help="after so many no problem is begun")
    parser.add_argument("--out", type=Path, default=Path("build/bench_gpu"), help="folder of the results")
    return parser.parse_args(arguments)


def plan(options: argparse.Namespace) -> Iterator[tuple[str, str, list[int], bool]]:
    """Shape, dtype, numbers of tokens, and whether it is the first."""
    for shape, dtype in itertools.product(options.shapes, options.dtypes):
        is_first = (shape, dtype) == (options.shapes[0], options.dtypes[0])
        tokens = options.tokens
        if options.quick and not is_first:
            tokens = [n for n in tokens if n in QUICK_TOKENS]
        yield shape, dtype, tokens, is_first


def run(options: argparse.Namespace, folder: Path, results: Results) -> None:
    start = time.perf_counter()
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    checkouts = {vendor.stem: getattr(options, vendor.stem) for vendor in VENDORS}
    builds = Builds(checkouts, options.include, folder, arch)
    floor, why_no_empty_op = build_libraries(folder, arch)
    vendors = builds.finish(options.dtypes, results.notes)
    if why_no_empty_op:
        results.notes.append(f"no empty op to compare the host's time with: {why_no_empty_op}")
    if "triton" in options.peers and "triton" not in results.versions:
        results.notes.append("no Triton kernel: triton is not installed")
    bench = Bench(options, floor, vendors, results.notes)
    results.nodes = bench.empty_nodes()
    measure_host(results, not why_no_empty_op, bench.rounds)
    for shape, dtype, tokens, is_first in plan(options):
        torch._dynamo.reset()
        pools = make_pools(shape, dtype)
        for num_tokens in tokens:
            seconds = time.perf_counter() - start
            if seconds > options.seconds:
                results.notes.append(f"NOT MEASURED, for lack of time: {shape}, {dtype}, {num_tokens} tokens")
                continue
            print(f"{seconds:.0f} s: {shape}, {dtype}, {num_tokens} tokens", file=sys.stderr, flush=True)
            copies = math.ceil(bench.timer.cache_bytes / bytes_of(shape, dtype, num_tokens))
            problem = make_problem(shape, dtype, num_tokens, pools, max(2, min(CHAIN, copies)))
            results.rows += bench.measure(problem, bench.peers(problem, is_first))
            results.write_json(options.out / "results.json")
            del problem
            gc.collect()
            torch.cuda.empty_cache()


def main() -> None:
    options = parse_options()
    if not torch.cuda.is_available():
        sys.exit("bench_gpu.py needs a CUDA GPU and a torch with CUDA")
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_grad_enabled(False)
    gc.disable()  # nothing is to be freed while a graph is captured
    results = Results(torch.cuda.get_device_name(), versions())
    try:
        with tempfile.TemporaryDirectory() as folder:
            run(options, Path(folder), results)
    finally:  # what there is by then
        report.write(results, options.out)


if __name__ == "__main__":
    main()
