"""Arguments of one call, for the tests: a good call, to be varied one factor at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torch_ropepool  # noqa: F401  registers the ops

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

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them: inv_freq too, where it is given."""
        return (*self.args, *(value for value in self.kwargs.values() if isinstance(value, Tensor)))

    def clone(self) -> Sample:
        """The same call on memory of its own. Strides are kept."""
        return self.map(Tensor.clone)

    def with_(self, **changes: Any) -> Sample:
        """The same call with other tensors, or other keyword arguments."""
        tensors = {name: value for name, value in changes.items() if name in TENSOR_NAMES}
        keywords = {name: value for name, value in changes.items() if name not in TENSOR_NAMES}
        return replace(self, **tensors, kwargs={**self.kwargs, **keywords})

    def map(self, convert: Callable[[Tensor], Tensor]) -> Sample:
        """The same call on what `convert` makes of each tensor."""
        args = [convert(t) for t in self.args]
        kwargs = {k: convert(v) if isinstance(v, Tensor) else v for k, v in self.kwargs.items()}
        return Sample(*args, kwargs=kwargs)

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


@dataclass
class ViewSpec:
    """One argument as a view of a buffer. Specs that name the same buffer share its memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    buffer: str
    strides: tuple[int, ...] | None = None  # contiguous
    offset: int = 0  # in elements
    device: str = "cpu"
    storage_bytes: int | None = None  # what the buffer is cut to afterwards

    @property
    def end(self) -> int:
        """The byte after the last that the view touches."""
        if 0 in self.shape:
            return 0
        strides = contiguous_strides(self.shape) if self.strides is None else self.strides
        last = sum((size - 1) * stride for size, stride in zip(self.shape, strides, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize


@dataclass
class CallSpec:
    """How to build a call, so that the same one can be built on several devices."""

    views: dict[str, ViewSpec]  # of TENSOR_NAMES, and of inv_freq if it is given
    kwargs: dict[str, Any]

    def has_variants(self) -> bool:
        """Whether a keyword argument with a default is given."""
        required = {"head_dim", "num_qo_heads", "num_kv_heads", "rope_base"}
        return "inv_freq" in self.views or not required.issuperset(self.kwargs)

    def build(self, device: str = "cpu", *, slot: int = 1) -> Sample:
        """The call on small positive numbers, every token stored to one slot."""
        buffers: dict[str, Tensor] = {}
        for name in {view.buffer for view in self.views.values()}:
            views = [view for view in self.views.values() if view.buffer == name]
            size = -(-max(view.end for view in views) // 16) * 16  # a multiple of every itemsize
            on = views[0].device if device == "cpu" else device
            if on == "meta":
                buffers[name] = torch.empty(size, dtype=torch.uint8, device=on)
                continue
            # Bytes below 64 are finite numbers in every dtype.
            words = torch.arange(1, size // 8 + 1) * 0x1E3779B97F4A7C15
            buffers[name] = (words & 0x3F3F3F3F3F3F3F3F).view(torch.uint8)
        tensors = {}
        for name, view in self.views.items():
            strides = contiguous_strides(view.shape) if view.strides is None else view.strides
            buffer = buffers[view.buffer].view(view.dtype)
            tensors[name] = buffer.as_strided(view.shape, strides, view.offset)
        slots, view = tensors["slots"], self.views["slots"]
        if slots.device.type == "cpu" and slots.dtype in (torch.int32, torch.int64):
            whole = buffers[view.buffer].view(view.dtype)
            elements = torch.arange(len(whole)).as_strided(slots.shape, slots.stride(), view.offset)
            whole[elements.flatten()] = slot  # also where the view is expanded
        for view in self.views.values():
            if view.storage_bytes is not None:
                buffers[view.buffer].untyped_storage().resize_(view.storage_bytes)
        arguments = {name: tensors.pop(name) for name in TENSOR_NAMES}
        return Sample(**arguments, kwargs={**self.kwargs, **tensors})


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for d in reversed(range(len(shape) - 1)):
        strides[d] = strides[d + 1] * max(shape[d + 1], 1)
    return tuple(strides)


def make_spec(
    num_tokens: int = 4,
    num_qo_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    pool_size: int = 128,
    *,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    rope_base: float = 10000.0,
) -> CallSpec:
    """A good call, every tensor contiguous in a buffer of its own."""
    shapes = {
        "q": (num_tokens, num_qo_heads, head_dim),
        "k": (num_tokens, num_kv_heads, head_dim),
        "v": (num_tokens, num_kv_heads, head_dim),
        "positions": (num_tokens,),
        "slots": (num_tokens,),
        "k_pool": (pool_size, num_kv_heads, head_dim),
        "v_pool": (pool_size, num_kv_heads, head_dim),
    }
    return CallSpec(
        {
            name: ViewSpec(shape, index_dtype if len(shape) == 1 else dtype, name)
            for name, shape in shapes.items()
        },
        {
            "head_dim": head_dim,
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "rope_base": rope_base,
        },
    )


def round_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 rounded to nearest even, once. (`x.to(dtype)` rounds twice for halves: by way of float32.)"""
    if dtype == torch.float64:
        return x
    with np.errstate(over="ignore"):  # to infinity, as rounding does
        if dtype == torch.float16:
            return torch.from_numpy(x.numpy().astype(np.float16))
        if dtype == torch.bfloat16:
            step = spacing(x, dtype).numpy()
            x = torch.from_numpy(np.rint(x.numpy() / step) * step)  # exact but for rint
        return torch.from_numpy(x.numpy().astype(np.float32)).to(dtype)  # one rounding, then none


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A unit in the last place of `dtype` at each of the float64 numbers `x`, as float64."""
    info = torch.finfo(dtype)
    digits = round(-math.log2(info.eps)) + 1  # of the significand: 8 for bfloat16
    smallest = round(math.log2(info.smallest_normal)) + 1 - digits  # exponent of the smallest step
    _, exponent = np.frexp(x.numpy())
    return torch.from_numpy(np.ldexp(1.0, np.maximum(exponent - digits, smallest)))


def place(t: Tensor, strides: tuple[int, ...], offset: int = 0) -> Tensor:
    """The same values as a view with these strides (in elements), in a buffer that is NaN elsewhere."""
    last = offset + sum((size - 1) * stride for size, stride in zip(t.shape, strides, strict=True))
    filler = float("nan") if t.is_floating_point() else -7
    view = torch.full((last + 6,), filler, dtype=t.dtype).as_strided(t.shape, strides, offset)
    return view.copy_(t)


def around(view: Tensor) -> Tensor:
    """Bits of the buffer that the view is part of, with the view's own elements zeroed."""
    buffer = view._base.clone()
    buffer.as_strided(view.shape, view.stride(), view.storage_offset()).zero_()
    return bits(buffer)
