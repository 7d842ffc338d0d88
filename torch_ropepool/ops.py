"""The documented Python functions. They only name the arguments: the ops do everything."""

from __future__ import annotations

from collections.abc import Sequence

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
    rope_base: float | None = None,
    inv_freq: Tensor | None = None,
    attention_scaling: float = 1.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    page_size: int | None = None,
    mrope_section: Sequence[int] | None = None,
    mrope_interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotates q and k by their positions and stores rotated k and raw v into the pools, in one pass.

    Pair i of a head, (x[i], x[i + rotary_dim / 2]), turns by `position * inv_freq[i]` radians, where
    `inv_freq[i] = rope_base ** (-2 i / rotary_dim)`: RoPE (RoFormer, arXiv 2104.09864, section 3.2.2)
    in the half-split layout of GPT-NeoX.

    Args:
        q: queries, `[num_tokens, num_qo_heads, head_dim]`; float16, bfloat16 or float32, and float64 on
            the CPU. This and every other tensor may have any strides.
        k: keys, `[num_tokens, num_kv_heads, head_dim]`, of q's dtype.
        v: values, as k. They are stored unrotated.
        positions: position of each token, any sign, `[num_tokens]`, int32 or int64.
        slots: pool row of each token, `[num_tokens]`, int32 or int64. Negative: the token is not stored.
            Of two tokens with one slot the later one's row stays. (On a GPU, under
            `torch.use_deterministic_algorithms(True)`; else a mix of both may.)
        k_pool, v_pool: `[pool_size, num_kv_heads, head_dim]`, of q's dtype. Written in place; rows
            whose slot is not named keep every bit.
        head_dim, num_qo_heads, num_kv_heads: the sizes that q, k, v and the pools must have.
        rope_base: base of the frequencies ("rope_theta"), finite and positive.
        inv_freq: in place of rope_base, the frequencies themselves, in radians per position,
            `[rotary_dim / 2]`: float32, or float64 on the CPU and CUDA; on q's device or on the CPU.
            For every kind of scaling (linear, dynamic NTK, llama3, YaRN, longrope).
        attention_scaling: a factor on cosine and sine, so on the features that turn (YaRN, longrope).
        rotary_dim: only the first rotary_dim features turn, the others stay bit for bit (GPT-NeoX, Phi,
            GLM, StableLM). Even, at most head_dim, which may then be odd. Default: head_dim.
        interleaved: pair i is (x[2 i], x[2 i + 1]) (GPT-J, GLM, Cohere).
        page_size: the pools are `[num_pages, page_size, num_kv_heads, head_dim]`, and a slot is
            page * page_size + offset. With strides this is any paged layout (vLLM, FlashInfer).
        mrope_section: positions are `[3, num_tokens]` (temporal, height, width), and the three entries
            say how many pairs take each; they sum up to rotary_dim / 2 (Qwen2-VL, Qwen2.5-VL).
        mrope_interleaved: pairs are dealt out to the three in turn instead of in runs (Qwen3-VL). As there,
            the second and third get at most every third pair, and the first gets what they leave.

    Returns:
        `(q_rot, k_rot, k_pool, v_pool)`: two new contiguous tensors, of q's and k's shape and dtype,
        and the two pools that were passed in.

    Raises:
        ValueError: an argument breaks this contract; or memory of a pool is also another argument's; or
            inv_freq is not finite (CPU only: undefined on a GPU).
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
        inv_freq=inv_freq,
        attention_scaling=attention_scaling,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        page_size=page_size,
        mrope_section=mrope_section,
        mrope_interleaved=mrope_interleaved,
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
    rope_base: float | None = None,
    inv_freq: Tensor | None = None,
    attention_scaling: float = 1.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    page_size: int | None = None,
    mrope_section: Sequence[int] | None = None,
    mrope_interleaved: bool = False,
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
        inv_freq=inv_freq,
        attention_scaling=attention_scaling,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        page_size=page_size,
        mrope_section=mrope_section,
        mrope_interleaved=mrope_interleaved,
    )
