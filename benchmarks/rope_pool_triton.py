"""The same job as one Triton kernel, written for the comparison: a block of tokens times a group of heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Config(NamedTuple):
    cached: bool  # cosines and sines are read, not computed
    tokens: int
    heads: int
    warps: int

    def __str__(self) -> str:
        angles = "cos/sin cached" if self.cached else "angles inside"
        return f"{angles}, {self.tokens} x {self.heads} heads, {self.warps} warps"


TILES = ((1, 4, 1), (1, 8, 1), (1, 8, 2), (1, 16, 4), (2, 8, 4), (4, 8, 4), (4, 8, 8), (8, 4, 4))
CONFIGS = [Config(cached, *tile) for cached in (True, False) for tile in TILES]


@triton.jit
def _turn(
    source, out, pool, tokens, slots, group, present, cos, sin,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, POOLED: tl.constexpr,
):  # fmt: skip
    """Rotates a group of heads of each token; with POOLED also stores it into the pool."""
    heads = (group * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[None, :, None]
    features = tl.arange(0, HALF)[None, None, :]
    within = heads * (2 * HALF) + features
    at = tokens[:, None, None] * (HEADS * 2 * HALF) + within
    mask = present[:, None, None] & (heads < HEADS)
    first = tl.load(source + at, mask).to(tl.float32)
    second = tl.load(source + at + HALF, mask).to(tl.float32)
    kind = out.dtype.element_ty
    first_turned = (first * cos[:, None, :] - second * sin[:, None, :]).to(kind)
    second_turned = (second * cos[:, None, :] + first * sin[:, None, :]).to(kind)
    tl.store(out + at, first_turned, mask)
    tl.store(out + at + HALF, second_turned, mask)
    if POOLED:
        row = slots[:, None, None] * (HEADS * 2 * HALF) + within
        tl.store(pool + row, first_turned, mask)
        tl.store(pool + row + HALF, second_turned, mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _rope_pool(
    q, k, v, positions, slots, k_pool, v_pool, cos_table, sin_table, inv_freq, q_out, k_out, num_tokens,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    CACHED: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    Q_GROUPS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    KV_GROUPS: tl.constexpr = (KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    present = tokens < num_tokens
    group = tl.program_id(1)
    if group < Q_GROUPS + KV_GROUPS:
        features = tl.arange(0, HALF)[None, :]
        if CACHED:  # both halves of a row of the table are alike
            at = tokens[:, None] * (2 * HALF) + features
            cos = tl.load(cos_table + at, present[:, None]).to(tl.float32)
            sin = tl.load(sin_table + at, present[:, None]).to(tl.float32)
        else:
            position = tl.load(positions + tokens, present).to(tl.float32)
            angle = position[:, None] * tl.load(inv_freq + features)
            cos = tl.cos(angle)
            sin = tl.sin(angle)
        if group < Q_GROUPS:
            _turn(q, q_out, k_pool, tokens, tokens, group, present, cos, sin, HEADS, HALF, BLOCK_HEADS, False)
        else:
            rows = tl.load(slots + tokens, present).to(tl.int64)
            _turn(
                k, k_out, k_pool, tokens, rows, group - Q_GROUPS, present, cos, sin,
                KV_HEADS, HALF, BLOCK_HEADS, True,
            )  # fmt: skip
    else:
        rows = tl.load(slots + tokens, present).to(tl.int64)
        heads = ((group - Q_GROUPS - KV_GROUPS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[None, :, None]
        within = heads * (2 * HALF) + tl.arange(0, 2 * HALF)[None, None, :]
        mask = present[:, None, None] & (heads < KV_HEADS)
        values = tl.load(v + tokens[:, None, None] * (KV_HEADS * 2 * HALF) + within, mask)
        tl.store(v_pool + rows[:, None, None] * (KV_HEADS * 2 * HALF) + within, values, mask)


def rope_pool_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    inv_freq: Tensor,
    config: Config,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """q_rot and k_rot. All tensors contiguous; cos and sin [num_tokens, head_dim], inv_freq float32."""
    q_out, k_out = (q, k) if in_place else (torch.empty_like(q), torch.empty_like(k))
    num_tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    groups = triton.cdiv(heads, config.heads) + 2 * triton.cdiv(kv_heads, config.heads)
    _rope_pool[(triton.cdiv(num_tokens, config.tokens), groups)](
        q, k, v, positions, slots, k_pool, v_pool, cos, sin, inv_freq, q_out, k_out, num_tokens,
        HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2,
        CACHED=config.cached, BLOCK_TOKENS=config.tokens, BLOCK_HEADS=config.heads, num_warps=config.warps,
    )  # fmt: skip
    return q_out, k_out
