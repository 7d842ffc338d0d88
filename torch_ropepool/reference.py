"""The op in plain torch: slow, simple, in float64. It says what the kernels must compute."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def rope_pool_fused(
    q: Tensor,  # [num_tokens, num_qo_heads, head_dim]
    k: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    v: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    positions: Tensor,  # [num_tokens], or [3, num_tokens] with mrope_section
    slots: Tensor,  # [num_tokens]
    k_pool: Tensor,  # [pool_size, num_kv_heads, head_dim], or [num_pages, page_size, ...] with page_size
    v_pool: Tensor,  # as k_pool
    *,
    head_dim: int,
    num_qo_heads: int,
    num_kv_heads: int,
    rope_base: float | None = None,
    inv_freq: Tensor | None = None,  # [rotary_dim / 2]
    attention_scaling: float = 1.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    page_size: int | None = None,
    mrope_section: Sequence[int] | None = None,
    mrope_interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`torch_ropepool.rope_pool_fused` for valid arguments: same results, same effect on the pools."""
    cos, sin = cos_sin(
        positions,
        head_dim if rotary_dim is None else rotary_dim,
        rope_base=rope_base,
        inv_freq=inv_freq,
        attention_scaling=attention_scaling,
        mrope_section=mrope_section,
        mrope_interleaved=mrope_interleaved,
    )
    q_rot = rotate(q, cos, sin, interleaved)
    k_rot = rotate(k, cos, sin, interleaved)
    for token, slot in enumerate(slots.tolist()):  # in order: of two tokens with one slot, the later wins
        if slot >= 0:
            row = slot if page_size is None else (slot // page_size, slot % page_size)
            k_pool[row] = k_rot[token]
            v_pool[row] = v[token]
    return q_rot, k_rot, k_pool, v_pool


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Turns pair i of each head by the angle of `cos[:, i]`, `sin[:, i]`; other features stay.

    Pair i is (x[i], x[i + num_pairs]), or (x[2 i], x[2 i + 1]) where interleaved.
    `x`: `[num_tokens, heads, head_dim]`; `cos`, `sin`: float64 `[num_tokens, num_pairs]` on the CPU,
    where this computes.
    """
    num_pairs = cos.shape[-1]
    first = slice(0, 2 * num_pairs, 2) if interleaved else slice(0, num_pairs)
    second = slice(1, 2 * num_pairs, 2) if interleaved else slice(num_pairs, 2 * num_pairs)
    x1, x2 = (x[..., part].to("cpu", torch.float64) for part in (first, second))
    cos, sin = cos[:, None, :], sin[:, None, :]  # the same for every head
    rotated = x.clone(memory_format=torch.contiguous_format)
    rotated[..., first] = (x1 * cos - x2 * sin).to(x.device, x.dtype)
    rotated[..., second] = (x2 * cos + x1 * sin).to(x.device, x.dtype)
    return rotated


def cos_sin(
    positions: Tensor,  # [num_tokens], or [3, num_tokens] with mrope_section
    rotary_dim: int,
    *,
    rope_base: float | None = None,
    inv_freq: Tensor | None = None,  # [rotary_dim / 2]
    attention_scaling: float = 1.0,
    mrope_section: Sequence[int] | None = None,
    mrope_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each token's angles, float64 `[num_tokens, rotary_dim / 2]` on the CPU.

    An angle, position * frequency, is first formed as a fraction of a turn in 64-bit integers. Their
    product wraps around at whole turns, so it is exact where floating point would not be.
    """
    num_pairs = rotary_dim // 2
    high, low = turns_of_inv_freq(inv_freq) if inv_freq is not None else turns_of_base(rope_base, num_pairs)
    position = positions.to("cpu", torch.int64)
    if mrope_section is None:
        position = position[:, None]
    else:
        position = position[mrope_axes(num_pairs, mrope_section, mrope_interleaved)].T
    phase = position * high + (position >> 32) * low + ((position & 0xFFFFFFFF) * low >> 32)
    angle = phase.double() * (2 * torch.pi / 2**64)
    return attention_scaling * angle.cos(), attention_scaling * angle.sin()


@lru_cache(maxsize=64)
def turns_of_base(rope_base: float | None, num_pairs: int) -> Tensor:
    """Turns per position, `rope_base ** (-i / num_pairs) / 2 pi` (RoFormer, arXiv 2104.09864, 3.2.2).

    Int64 `[2, num_pairs]`: in units of 2^-64 turn, and the rest in units of 2^-96. Whole turns dropped.
    """
    import mpmath  # comes with torch, through sympy

    with mpmath.workprec(1400):
        base = mpmath.mpf(rope_base)
        return _fixed_point(
            [base ** (mpmath.mpf(-i) / num_pairs) / (2 * mpmath.pi) for i in range(num_pairs)]
        )


def turns_of_inv_freq(inv_freq: Tensor) -> Tensor:
    """The same for frequencies in radians per position, `[num_pairs]`."""
    import mpmath

    with mpmath.workprec(1400):
        return _fixed_point([mpmath.mpf(f) / (2 * mpmath.pi) for f in inv_freq.tolist()])


def _fixed_point(turns: list[Any]) -> Tensor:
    """Each number of turns to the nearest 2^-64, as a wrapped int64, and the rest in units of 2^-96."""
    import mpmath

    high, low = [], []
    for number in turns:
        nearest, rest = divmod(int(mpmath.floor(number * 2**96)) + 2**31, 2**32)
        high.append((nearest + 2**63) % 2**64 - 2**63)
        low.append(rest - 2**31)
    return torch.tensor([high, low], dtype=torch.int64)


def mrope_axes(num_pairs: int, section: Sequence[int], interleaved: bool) -> list[int]:
    """Which row of positions (temporal, height, width) each pair takes.

    Qwen2-VL (arXiv 2409.12191) gives each axis a run of pairs; Qwen3-VL deals them out in turn.
    """
    if not interleaved:
        return [axis for axis in range(3) for _ in range(section[axis])]
    return [i % 3 if i < 3 * section[i % 3] else 0 for i in range(num_pairs)]
