"""The documented Python functions. They only name the arguments: the ops do everything."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_pool_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    head_dim: int,
    num_qo_heads: int,
    num_kv_heads: int,
    rope_base: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotates q and k by their positions and stores rotated k and raw v into the pools, in one pass.

    Pair i of a head, (x[i], x[i + head_dim / 2]), turns by `position * rope_base ** (-2 i / head_dim)`
    radians: RoPE (RoFormer, arXiv 2104.09864, section 3.2.2) in the half-split layout of GPT-NeoX.

    Args:
        q: queries, `[num_tokens, num_qo_heads, head_dim]`; float16, bfloat16 or float32, and float64 on
            the CPU. This and every other tensor may have any strides.
        k: keys, `[num_tokens, num_kv_heads, head_dim]`, of q's dtype.
        v: values, as k. They are stored unrotated.
        positions: position of each token, any sign, `[num_tokens]`, int32 or int64.
        slots: pool row of each token, `[num_tokens]`, int32 or int64. Negative: the token is not stored.
            Of two tokens with one slot the later one's row stays (on a GPU, a mix of both may).
        k_pool, v_pool: `[pool_size, num_kv_heads, head_dim]`, of q's dtype. Written in place; rows
            whose slot is not named keep every bit.
        head_dim, num_qo_heads, num_kv_heads: the sizes that q, k, v and the pools must have.
        rope_base: base of the frequencies ("rope_theta"), finite and positive.

    Returns:
        `(q_rot, k_rot, k_pool, v_pool)`: two new contiguous tensors, of q's and k's shape and dtype,
        and the two pools that were passed in.

    Raises:
        ValueError: an argument breaks this contract; or memory of a pool is also another argument's.
        IndexError: a slot is not below pool_size (CPU only: a GPU leaves that token's rows out).
        RuntimeError: grad mode is on and an argument requires grad. There is no backward.

    Nothing has been written when an error is raised.
    """
    result: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.ropepool.rope_pool_fused(
        q,
        k,
        v,
        positions,
        slots,
        k_pool,
        v_pool,
        head_dim=head_dim,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        rope_base=rope_base,
    )
    return result


def rope_pool_fused_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    head_dim: int,
    num_qo_heads: int,
    num_kv_heads: int,
    rope_base: float,
) -> None:
    """`rope_pool_fused` that rotates q and k in place and allocates nothing.

    Arguments and errors are those of `rope_pool_fused`. Since q and k are written, each must not share
    memory with itself (as an expanded tensor does) or with any other argument: ValueError.
    """
    torch.ops.ropepool.rope_pool_fused_(
        q,
        k,
        v,
        positions,
        slots,
        k_pool,
        v_pool,
        head_dim=head_dim,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        rope_base=rope_base,
    )
