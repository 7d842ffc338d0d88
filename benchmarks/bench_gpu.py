"""Is the CUDA kernel as fast as a copy of the same bytes between the same rows, without arithmetic?

`python benchmarks/bench_gpu.py` builds the copy with nvcc (gpu_floor.cu), takes the fastest of its variants
for each size, and times both as nodes of CUDA graphs, going round inputs that together are more than twice
the L2 cache: medians, GB/s, and the ratio copy / op. Writes JSON where asked. At least 0.95 is wanted from
16384 tokens on, 0.92 at 4096, 0.90 at 1024; at 64 and fewer, copy / op of 0.87.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import torch_ropepool  # noqa: F401  registers the ops

SHAPES = {"Llama-3-8B": (32, 8, 128), "Qwen 40/8": (40, 8, 128), "SmolLM2-135M": (9, 3, 64)}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
POOL_SIZE = 131072
ROPE_BASE = 500000.0
CACHE = 2.5 * 60e6  # bytes: more than twice an H200's L2
ROUNDS = 15


class CopyArgs(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("q", "k", "v", "q_out", "k_out", "k_pool", "v_pool", "slots")]
        + [("num_tokens", ctypes.c_int64), ("q_chunks", ctypes.c_int32), ("kv_chunks", ctypes.c_int32)]
    )  # fmt: skip


@dataclass
class Inputs:
    """One call's tensors; the pools are shared."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    slots: Tensor
    k_pool: Tensor
    v_pool: Tensor
    q_out: Tensor
    k_out: Tensor

    def args(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.positions, self.slots, self.k_pool, self.v_pool


@dataclass
class Problem:
    shape: str
    dtype: str
    num_tokens: int
    inputs: list[Inputs]

    @property
    def kwargs(self) -> dict[str, float]:
        heads, kv_heads, head_dim = SHAPES[self.shape]
        return {
            "head_dim": head_dim,
            "num_qo_heads": heads,
            "num_kv_heads": kv_heads,
            "rope_base": ROPE_BASE,
        }

    @property
    def bytes(self) -> int:
        heads, kv_heads, head_dim = SHAPES[self.shape]
        return (2 * heads + 5 * kv_heads) * head_dim * DTYPES[self.dtype].itemsize * self.num_tokens


def make_problem(
    shape: str, dtype: str, num_tokens: int, pools: tuple[Tensor, Tensor], copies: int
) -> Problem:
    heads, kv_heads, head_dim = SHAPES[shape]
    kind = {"dtype": DTYPES[dtype], "device": "cuda"}
    inputs = []
    for _ in range(copies):
        q = torch.randn(num_tokens, heads, head_dim, **kind)
        k = torch.randn(num_tokens, kv_heads, head_dim, **kind)
        inputs.append(
            Inputs(
                q,
                k,
                torch.randn(num_tokens, kv_heads, head_dim, **kind),
                torch.randint(0, 131072, (num_tokens,), dtype=torch.int32, device="cuda"),
                torch.randperm(POOL_SIZE, device="cuda")[:num_tokens].int(),
                *pools,
                torch.empty_like(q),
                torch.empty_like(k),
            )
        )
    return Problem(shape, dtype, num_tokens, inputs)


# ---- What is compared


class Floor:
    """The copy, in the fastest variant for the problem."""

    def __init__(self, folder: Path) -> None:
        library = folder / "gpu_floor.so"
        source = Path(__file__).with_name("gpu_floor.cu")
        subprocess.run(
            [
                "nvcc",
                "-O3",
                "-std=c++17",
                "-arch=native",
                "-shared",
                "-Xcompiler",
                "-fPIC",
                "-o",
                library,
                source,
            ],
            check=True,
        )
        self.library = ctypes.CDLL(str(library))

    def call(self, x: Inputs, variant: int, threads: int, splits: int, in_place: bool) -> None:
        q_out, k_out = (x.q, x.k) if in_place else (x.q_out, x.k_out)
        tensors = (x.q, x.k, x.v, q_out, k_out, x.k_pool, x.v_pool, x.slots)
        per_token = (x.q[0].nbytes // 16, x.k[0].nbytes // 16)
        args = CopyArgs(*[t.data_ptr() for t in tensors], len(x.q), *per_token)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = self.library.copy_rows(ctypes.byref(args), variant, threads, splits, stream)
        assert status == 0, status

    def empty(self) -> None:
        self.library.empty_launch(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))

    def best(self, problem: Problem, in_place: bool) -> tuple[float, str]:
        """Seconds, and what the fastest variant was."""
        chunks = sum(t[0].nbytes // 16 for t in problem.inputs[0].args()[:3])
        found = (math.inf, "")
        for variant, threads in itertools.product(range(6), (32, 64, 128, 256, 512)):
            unroll = 2 ** (variant // 2)
            most_splits = max(1, -(-chunks // (threads * unroll))) if problem.num_tokens <= 4096 else 1
            for splits in {1, most_splits}:
                copy = partial(self.call, variant=variant, threads=threads, splits=splits, in_place=in_place)
                name = f"{unroll} chunks a thread{', streaming' * (variant % 2)}, {threads} threads"
                found = min(found, (time_graph(problem, copy, rounds=3), f"{name}, {splits} blocks a token"))
        return found


# ---- Timing


def time_graph(problem: Problem, call: Callable[[Inputs], object], *, rounds: int = ROUNDS) -> float:
    """Median seconds of a call as a node of a CUDA graph, the nodes going round the inputs."""
    inputs = problem.inputs
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(inputs[0])
        call(inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for x in inputs:
            call(x)
    return statistics.median(time_replays(graph, rounds)) / len(inputs)


def time_replays(graph: torch.cuda.CUDAGraph, rounds: int) -> list[float]:
    graph.replay()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return times


def op_calls(problem: Problem) -> dict[str, Callable[[Inputs], object]]:
    fused, in_place = torch.ops.ropepool.rope_pool_fused, torch.ops.ropepool.rope_pool_fused_
    kwargs = problem.kwargs
    return {
        "fresh": lambda x: fused(*x.args(), **kwargs),
        "in place": lambda x: in_place(*x.args(), **kwargs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 64, 256, 1024, 4096, 16384, 65536])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        floor = Floor(Path(folder))
        print("| shape | dtype | num_tokens | form | op, µs | copy, µs | copy / op | GB/s | copy's variant |")
        print("|---|---|---|---|---|---|---|---|---|")
        for shape in options.shapes:
            for dtype in options.dtypes:
                heads, kv_heads, head_dim = SHAPES[shape]
                kind = {"dtype": DTYPES[dtype], "device": "cuda"}
                pools = tuple(torch.zeros(POOL_SIZE, kv_heads, head_dim, **kind) for _ in range(2))
                for num_tokens in options.tokens:
                    token_bytes = (2 * heads + 5 * kv_heads) * head_dim * DTYPES[dtype].itemsize
                    copies = max(2, min(200, math.ceil(CACHE / (token_bytes * num_tokens))))
                    problem = make_problem(shape, dtype, num_tokens, pools, copies)
                    for form, call in op_calls(problem).items():
                        copy, variant = floor.best(problem, form == "in place")
                        seconds = time_graph(problem, call)
                        rows.append(
                            {
                                "shape": shape,
                                "dtype": dtype,
                                "num_tokens": num_tokens,
                                "form": form,
                                "op": seconds,
                                "copy": copy,
                                "variant": variant,
                            }
                        )
                        print(
                            f"| {shape} | {dtype} | {num_tokens} | {form} | {1e6 * seconds:.2f} "
                            f"| {1e6 * copy:.2f} | {copy / seconds:.3f} "
                            f"| {problem.bytes / seconds / 1e9:.0f} | {variant} |",
                            flush=True,
                        )
                    del problem
        print(f"empty kernel in a graph of 200: {1e6 * empty_node(floor):.2f} µs a node")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def empty_node(floor: Floor) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(200):
            floor.empty()
    return statistics.median(time_replays(graph, ROUNDS)) / 200


if __name__ == "__main__":
    main()
