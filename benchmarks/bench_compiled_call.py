"""What a compiled call costs beside an eager one: a decode step's single token, in one run.

The functions take turns, so that what else the machine does hits all. Prints the median time of a call,
the median of the rounds' ratios to eager, and the middle half of them.
`python benchmarks/bench_compiled_call.py`
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import FunctionType

import torch
from torch import Tensor

import torch_ropepool

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, POOL_SIZE = 32, 8, 128, 8192  # Llama-3-8B
SECONDS_PER_TURN = 0.01


def step(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor):
    return torch_ropepool.rope_pool_fused(
        q,
        k,
        v,
        positions,
        slots,
        k_pool,
        v_pool,
        head_dim=HEAD_DIM,
        num_qo_heads=NUM_QO_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        rope_base=500000.0,
    )[:2]


def copied(function: FunctionType) -> FunctionType:
    """With code of its own: torch keeps compiled graphs by code, and would look through both's."""
    return FunctionType(function.__code__.replace(), function.__globals__)


def seconds_per_call(function: Callable[..., object], args: tuple[Tensor, ...]) -> float:
    times = []
    stop = time.perf_counter() + SECONDS_PER_TURN
    while len(times) < 3 or time.perf_counter() < stop:
        start = time.perf_counter()
        function(*args)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)

    qkv = torch.randn(1, NUM_QO_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM).bfloat16()
    pools = [torch.zeros(POOL_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2)]
    q, k, v = qkv.split([NUM_QO_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    args = (q, k, v, torch.tensor([4000]), torch.tensor([100]), *pools)
    functions = {
        "eager": step,
        "torch.compile": torch.compile(copied(step), fullgraph=True),
        "torch.compile, dynamic=True": torch.compile(copied(step), fullgraph=True, dynamic=True),
    }
    for function in functions.values():
        function(*args)
    times = [[seconds_per_call(function, args) for function in functions.values()] for _ in range(rounds)]

    print("| call | µs | / eager | middle half |")
    print("|---|---|---|---|")
    for i, name in enumerate(functions):
        low, ratio, high = statistics.quantiles((turn[i] / turn[0] for turn in times), n=4)
        microseconds = 1e6 * statistics.median(turn[i] for turn in times)
        print(f"| {name} | {microseconds:.1f} | {ratio:.2f} | {low:.2f}-{high:.2f} |")


if __name__ == "__main__":
    main()
