"""Arguments of one call, for the tests: a good call, to be varied one factor at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

OPS = {
    "rope_pool_fused": torch.ops.ropepool.rope_pool_fused,
    "_rope_pool_fused": torch.ops.ropepool._rope_pool_fused,
    "rope_pool_fused_": torch.ops.ropepool.rope_pool_fused_,
}
TENSOR_NAMES = ("q", "k", "v", "positions", "slots", "k_pool", "v_pool")


@dataclass
class Sample:
    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    slots: Tensor
    k_pool: Tensor
    v_pool: Tensor
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def args(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in TENSOR_NAMES)

    def clone(self) -> Sample:
        """The same call on memory of its own. Strides are kept."""
        return Sample(*(t.clone() for t in self.args), kwargs=dict(self.kwargs))

    def with_(self, **changes: Any) -> Sample:
        """The same call with other tensors, or other keyword arguments."""
        tensors = {name: value for name, value in changes.items() if name in TENSOR_NAMES}
        keywords = {name: value for name, value in changes.items() if name not in TENSOR_NAMES}
        return replace(self, **tensors, kwargs={**self.kwargs, **keywords})

    def run(self, op: str = "rope_pool_fused") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Calls one of the three ops. Returns what the fused op returns, whichever it was."""
        result = OPS[op](*self.args, **self.kwargs)
        if op == "rope_pool_fused":
            return result
        if op == "_rope_pool_fused":
            return (*result, self.k_pool, self.v_pool)
        return self.q, self.k, self.k_pool, self.v_pool


def make_sample(
    num_tokens: int = 7,
    num_qo_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    pool_size: int = 32,
    *,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    rope_base: float = 10000.0,
    max_position: int = 4096,
    seed: int = 0,
) -> Sample:
    """Contiguous tensors of normal numbers, distinct slots in random order, pools that are not zero."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return Sample(
        q=normal(num_tokens, num_qo_heads, head_dim),
        k=normal(num_tokens, num_kv_heads, head_dim),
        v=normal(num_tokens, num_kv_heads, head_dim),
        positions=torch.randint(max_position, (num_tokens,), generator=generator).to(index_dtype),
        slots=torch.randperm(pool_size, generator=generator)[:num_tokens].to(index_dtype),
        k_pool=normal(pool_size, num_kv_heads, head_dim),
        v_pool=normal(pool_size, num_kv_heads, head_dim),
        kwargs={
            "head_dim": head_dim,
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "rope_base": rope_base,
        },
    )


def bits(t: Tensor) -> Tensor:
    """The tensor's elements as integers, for comparisons that tell -0.0 from 0.0 and NaN from NaN."""
    return t.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize])
