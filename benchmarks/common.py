"""What the CPU's and the GPU's benchmarks share: the problems' sizes, peers in torch, rounds, tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

SHAPES = {"Llama-3-8B": (32, 8, 128), "Qwen 40/8": (40, 8, 128), "SmolLM2-135M": (9, 3, 64)}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ROPE_BASE = 500000.0


def bytes_of(shape: str, dtype: str, num_tokens: int) -> int:
    """q, k and v are read; q_rot, k_rot and both pools' rows are written."""
    heads, kv_heads, head_dim = SHAPES[shape]
    return (2 * heads + 5 * kv_heads) * head_dim * DTYPES[dtype].itemsize * num_tokens


# ---- Peers in torch


def eager(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """What models do: cosines and sines made once for all layers, half-split rotation, index_copy_."""

    def turn(t: Tensor) -> Tensor:
        first, second = t.chunk(2, dim=-1)
        return t * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

    q_rot, k_rot = turn(q), turn(k)
    k_pool.index_copy_(0, slots, k_rot)
    v_pool.index_copy_(0, slots, v)
    return q_rot, k_rot


def eager_with_angles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
) -> tuple[Tensor, Tensor]:
    angles = (positions.float()[:, None] * inv_freq).repeat(1, 2)
    return eager(q, k, v, slots, k_pool, v_pool, angles.cos().to(q.dtype), angles.sin().to(q.dtype))


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """In float64."""
    head_dim = x.shape[-1]
    exponents = torch.arange(0, head_dim, 2, device=x.device, dtype=torch.float64) / head_dim
    angles = positions.double()[:, None, None] * ROPE_BASE**-exponents
    cos, sin = angles.cos(), angles.sin()
    first, second = x.double().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


# ---- Rounds and tables


class Spread(NamedTuple):
    """The median and the middle half."""

    low: float
    median: float
    high: float

    def text(self, scale: float = 1e6, digits: int = 2) -> str:
        low, median, high = (f"{scale * value:.{digits}f}" for value in self)
        return f"{median} ({low}-{high})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def interleave(measures: dict[Any, Callable[[], float]], rounds: int) -> dict[Any, list[float]]:
    """Every measure once a round, so that what else happens hits all; each round begins with another."""
    names = list(measures)
    times: dict[Any, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        start = i % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(measures[name]())
    return times


def markdown(header: str, lines: Iterable[Iterable[str]]) -> str:
    columns = header.split(" | ")
    return "\n".join("| " + " | ".join(line) + " |" for line in [columns, ["---"] * len(columns), *lines])
