"""The op in plain torch: slow, simple, in float64. It says what the kernels must compute."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def rope_pool_fused(
    q: Tensor,  # [num_tokens, num_qo_heads, head_dim]
    k: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    v: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    positions: Tensor,  # [num_tokens]
    slots: Tensor,  # [num_tokens]
    k_pool: Tensor,  # [pool_size, num_kv_heads, head_dim]
    v_pool: Tensor,  # [pool_size, num_kv_heads, head_dim]
    *,
    head_dim: int,
    num_qo_heads: int,
    num_kv_heads: int,
    rope_base: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`torch_ropepool.rope_pool_fused` for valid arguments: same results, same effect on the pools."""
    cos, sin = cos_sin(positions, head_dim, rope_base)
    q_rot = rotate(q, cos, sin)
    k_rot = rotate(k, cos, sin)
    for token, slot in enumerate(slots.tolist()):  # in order: of two tokens with one slot, the later wins
        if slot >= 0:
            k_pool[slot] = k_rot[token]
            v_pool[slot] = v[token]
    return q_rot, k_rot, k_pool, v_pool


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (x[..., i], x[..., i + head_dim / 2]) of `x` `[num_tokens, heads, head_dim]`.

    `cos`, `sin`: float64 `[num_tokens, head_dim / 2]` on the CPU. Computes in float64 on the CPU.
    """
    x1, x2 = x.to("cpu", torch.float64).chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]  # the same for every head
    rotated = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)
    return rotated.to(x.device, x.dtype)


def cos_sin(positions: Tensor, head_dim: int, rope_base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of `position * rope_base ** (-2 i / head_dim)`, float64 `[num_tokens, head_dim / 2]`.

    The angle is first formed as a fraction of a turn in 64-bit integers. Their product wraps around
    at whole turns, so it is exact where `position * inv_freq` in floating point would not be.
    The formula is that of RoFormer (arXiv 2104.09864), section 3.2.2.
    """
    high, low = frequencies(head_dim, rope_base)
    position = positions.to("cpu", torch.int64)[:, None]
    phase = position * high + (position >> 32) * low + ((position & 0xFFFFFFFF) * low >> 32)
    angle = phase.double() * (2 * torch.pi / 2**64)
    return angle.cos(), angle.sin()


@lru_cache(maxsize=16)
def frequencies(head_dim: int, rope_base: float) -> tuple[Tensor, Tensor]:
    """Turns per position of each pair, int64 `[head_dim / 2]`: in units of 2^-64 and, beyond that, 2^-96."""
    import mpmath  # comes with torch, through sympy

    high, low = [], []
    with mpmath.workprec(1400):
        for i in range(head_dim // 2):
            turns = mpmath.mpf(rope_base) ** (mpmath.mpf(-2 * i) / head_dim) / (2 * mpmath.pi)
            fraction = int(mpmath.nint(turns * 2**96)) % 2**96
            nearest, rest = divmod(fraction + 2**31, 2**32)
            high.append((nearest + 2**63) % 2**64 - 2**63)  # as a signed integer, whole turns dropped
            low.append(rest - 2**31)
    return torch.tensor(high, dtype=torch.int64), torch.tensor(low, dtype=torch.int64)
