"""The ops on tensors without data: the contract on symbolic shapes, the fake kernel, tracing.

The contract is that of csrc/contract.cpp, check by check and text by text;
tests/test_contract_parity.py holds the two together. A comparison of sizes is one
`torch._check_value` each, since only that form traces with unbacked sizes.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.auto_functionalize import get_base
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.torch_version import TorchVersion

from ._library import LIBRARY

ALL_TENSORS = ("q", "k", "v", "positions", "slots", "k_pool", "v_pool")


@dataclass(frozen=True)
class Call:
    """The arguments of one call, the same for the three ops."""

    q: Tensor  # [num_tokens, num_qo_heads, head_dim]
    k: Tensor  # [num_tokens, num_kv_heads, head_dim]
    v: Tensor  # [num_tokens, num_kv_heads, head_dim]
    positions: Tensor  # [num_tokens]; [3, num_tokens] with mrope_section
    slots: Tensor  # [num_tokens]
    k_pool: Tensor  # [pool_size, num_kv_heads, head_dim]; [num_pages, page_size, ...] with page_size
    v_pool: Tensor  # as k_pool
    head_dim: int
    num_qo_heads: int
    num_kv_heads: int
    rope_base: float | None = None
    inv_freq: Tensor | None = None  # [rotary_dim / 2]
    attention_scaling: float = 1.0
    rotary_dim: int | None = None
    interleaved: bool = False
    page_size: int | None = None
    mrope_section: Sequence[int] | None = None
    mrope_interleaved: bool = False

    def __post_init__(self) -> None:
        for name, tensor in self.tensors(*ALL_TENSORS):
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{name} must be a tensor, got {tensor}")
            if tensor.layout != torch.strided or tensor.is_nested:
                layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
                raise ValueError(f"{name} must be a dense strided tensor, got layout {layout}")

    def tensors(self, *names: str) -> Iterator[tuple[str, Tensor]]:
        return ((name, getattr(self, name)) for name in names)

    @property
    def turned_dim(self) -> int:
        return self.head_dim if self.rotary_dim is None else self.rotary_dim


def require_no_grad(call: Call) -> None:
    """Raises RuntimeError where autograd would have to record: the op has no backward."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in call.tensors("q", "k", "v", "k_pool", "v_pool", "inv_freq"):
        if tensor is not None and tensor.requires_grad:
            raise RuntimeError(
                f"rope_pool_fused has no backward, but {name} requires grad: "
                f"call it under torch.no_grad(), or detach {name}"
            )


def check_contract(call: Call, *, in_place: bool) -> None:
    """Raises ValueError for the first broken rule, wherever the sizes are known."""
    _check_ranks(call)
    _check_shapes(call)
    _check_dtypes(call)
    _check_scalars(call)
    _check_memory(call)
    _check_overlaps(call, in_place)
    _check_inv_freq(call, in_place)
    if not abs(call.attention_scaling) <= torch.finfo(torch.float32).max:
        raise ValueError(f"attention_scaling must be finite in float32, got {call.attention_scaling:g}")
    _check_rotary_dim(call)
    _check_page_size(call)
    _check_mrope(call)


def _require(condition: Any, text: str, hint: Callable[[], str] = str) -> None:
    torch._check_value(condition, lambda: text + hint())


def _shape(t: Tensor) -> str:
    return str(list(t.shape))


def _dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _equal_ints(*pairs: tuple[Any, Any]) -> bool:
    """Whether all pairs are plain ints and equal: a question that puts no guard on a symbolic size."""
    return all(type(a) is int and type(b) is int and a == b for a, b in pairs)


def _check_ranks(c: Call) -> None:
    for name, t in c.tensors("q", "k", "v"):
        heads = c.num_qo_heads if name == "q" else c.num_kv_heads
        if t.dim() != 3:
            hint = _rank_hint(name, t, heads, c.head_dim)
            raise ValueError(f"rope_pool_fused expects q/k/v to be 3-D, got {name} {_shape(t)}{hint}")
    if c.mrope_section is not None:
        text = f"positions must be [3, num_tokens], got {_shape(c.positions)}"
        _require(c.positions.dim() == 2, text)
        _require(c.positions.shape[0] == 3, text)
    for name, t in c.tensors("positions", "slots"):
        if t.dim() != 1 and not (name == "positions" and c.mrope_section is not None):
            raise ValueError(f"rope_pool_fused expects positions/slots to be 1-D, got {name} {_shape(t)}")
    for name, t in c.tensors("k_pool", "v_pool"):
        rank = 3 if c.page_size is None else 4
        if t.dim() != rank:
            hint = _pool_rank_hint(name, t, c.num_kv_heads, c.head_dim) if rank == 3 else ""
            text = f"rope_pool_fused expects pool tensors to be {rank}-D, got {name} {_shape(t)}"
            raise ValueError(text + hint)


def _rank_hint(name: str, t: Tensor, heads: int, head_dim: int) -> str:
    if t.dim() == 2 and heads > 0 and _equal_ints((t.shape[1], heads * head_dim)):
        return f"\nhint: the heads of {name} are packed; pass {name}.view({t.shape[0]}, {heads}, {head_dim})"
    if t.dim() == 4 and _equal_ints((t.shape[2], heads), (t.shape[3], head_dim)):
        return f"\nhint: {name} has a batch dimension; pass {name}.flatten(0, 1)"
    return ""


def _pool_rank_hint(name: str, t: Tensor, heads: int, head_dim: int) -> str:
    if t.dim() == 4 and _equal_ints((t.shape[2], heads), (t.shape[3], head_dim)):
        return f"\nhint: for a paged pool, pass page_size={t.shape[1]}"
    return _rank_hint(name, t, heads, head_dim)


def _check_shapes(c: Call) -> None:
    num_tokens = c.q.shape[0]

    def swapped_hint() -> str:
        swapped = _equal_ints((c.q.shape[1], c.num_kv_heads), (c.k.shape[1], c.num_qo_heads))
        return "\nhint: num_qo_heads and num_kv_heads look swapped" if swapped else ""

    text = (
        f"q shape must be [num_tokens, num_qo_heads, head_dim], got {_shape(c.q)} "
        f"with num_qo_heads {c.num_qo_heads}, head_dim {c.head_dim}"
    )
    _require(c.q.shape[1] == c.num_qo_heads, text, swapped_hint)
    _require(c.q.shape[2] == c.head_dim, text, swapped_hint)

    text = (
        f"k shape must be [num_tokens, num_kv_heads, head_dim], got {_shape(c.k)} "
        f"with num_tokens {num_tokens}, num_kv_heads {c.num_kv_heads}, head_dim {c.head_dim}"
    )
    _require(c.k.shape[0] == num_tokens, text)
    _require(c.k.shape[1] == c.num_kv_heads, text)
    _require(c.k.shape[2] == c.head_dim, text)

    for d in range(3):
        _require(
            c.v.shape[d] == c.k.shape[d], f"v shape must match k shape, got {_shape(c.v)} vs {_shape(c.k)}"
        )

    if c.mrope_section is not None:
        text = f"positions must be [3, num_tokens], got {_shape(c.positions)}"
        _require(c.positions.shape[1] == num_tokens, text)
    text = (
        f"positions/slots must have one entry per token, got positions {_shape(c.positions)}, "
        f"slots {_shape(c.slots)} for {num_tokens} tokens"
    )
    _require(c.positions.shape[-1] == num_tokens, text)
    _require(c.slots.shape[0] == num_tokens, text)

    leading = "pool_size" if c.page_size is None else "num_pages, page_size"
    text = (
        f"k_pool has incompatible shape {_shape(c.k_pool)}: must be [{leading}, num_kv_heads, head_dim] "
        f"with num_kv_heads {c.num_kv_heads}, head_dim {c.head_dim}"
    )
    _require(c.k_pool.shape[-2] == c.num_kv_heads, text)
    _require(c.k_pool.shape[-1] == c.head_dim, text)

    for d in range(c.k_pool.dim()):
        _require(
            c.v_pool.shape[d] == c.k_pool.shape[d],
            f"v_pool shape must match k_pool shape, got {_shape(c.v_pool)} vs {_shape(c.k_pool)}",
        )


def _check_dtypes(c: Call) -> None:
    if not c.q.dtype == c.k.dtype == c.v.dtype:
        raise ValueError(f"q/k/v dtypes must match, got q {_dtype(c.q)}, k {_dtype(c.k)}, v {_dtype(c.v)}")
    if not c.q.dtype == c.k_pool.dtype == c.v_pool.dtype:
        raise ValueError(
            f"pool dtypes must match q/k/v dtype, got k_pool {_dtype(c.k_pool)}, "
            f"v_pool {_dtype(c.v_pool)} with q/k/v {_dtype(c.q)}"
        )
    allowed = {torch.float16, torch.bfloat16, torch.float32}
    if c.q.device.type in ("cpu", "meta"):
        allowed.add(torch.float64)
    if c.q.dtype not in allowed:
        raise ValueError(f"q/k/v dtype must be float16, bfloat16 or float32, got {_dtype(c.q)}")
    for name, t in c.tensors("positions", "slots"):
        if t.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"positions/slots must be int32 or int64, got {name} {_dtype(t)}")


def _check_scalars(c: Call) -> None:
    if c.rotary_dim is None:
        text = f"head_dim must be even and at least 2, got {c.head_dim}"
        _require(c.head_dim % 2 == 0, text)
        _require(c.head_dim >= 2, text)
    _require(c.num_qo_heads >= 1, f"num_qo_heads must be at least 1, got {c.num_qo_heads}")
    _require(c.num_kv_heads >= 1, f"num_kv_heads must be at least 1, got {c.num_kv_heads}")
    if c.rope_base is not None and not (math.isfinite(c.rope_base) and c.rope_base > 0):
        raise ValueError(f"rope_base must be finite and positive, got {c.rope_base:g}")


@dataclass(frozen=True)
class _View:
    """A tensor's place in its storage, where all of it is plain ints."""

    storage: int
    storage_bytes: int | None  # None where export knows it by symbols only
    offset: int  # in bytes
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(t: Tensor) -> _View | None:
        storage = t.untyped_storage()
        offset, storage_bytes = t.storage_offset(), storage.nbytes()
        if not all(type(number) is int for number in (*t.shape, *t.stride(), offset)):
            return None
        return _View(
            storage=storage._cdata,
            storage_bytes=storage_bytes if type(storage_bytes) is int else None,
            offset=int(offset) * t.itemsize,
            itemsize=t.itemsize,
            sizes=tuple(t.shape),
            strides=t.stride(),
        )

    @property
    def needed_bytes(self) -> int:
        if 0 in self.sizes:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return self.offset + (last + 1) * self.itemsize

    def c_geometry(self) -> tuple[Any, ...]:
        dims = ctypes.c_int64 * len(self.sizes)
        return (
            ctypes.c_int64(self.itemsize),
            ctypes.c_int64(len(self.sizes)),
            dims(*self.sizes),
            dims(*self.strides),
        )


def _check_device(c: Call, name: str, t: Tensor) -> None:
    # A fake tensor keeps the index of "cpu:0", which is "cpu".
    if (t.device.type, t.device.index or 0) != (c.q.device.type, c.q.device.index or 0):
        raise ValueError(f"all tensors must be on one device, got q on {c.q.device}, {name} on {t.device}")


def _check_storage(name: str, t: Tensor) -> None:
    view = _View.of(t)
    if view is None or view.storage_bytes is None:
        return
    if view.needed_bytes > view.storage_bytes:
        raise ValueError(
            f"{name} needs a storage of {view.needed_bytes} bytes, got one of {view.storage_bytes}"
        )


def _check_memory(c: Call) -> None:
    for name, t in c.tensors(*ALL_TENSORS):
        _check_device(c, name, t)
    for name, t in c.tensors(*ALL_TENSORS):
        _check_storage(name, t)


def _check_overlaps(c: Call, in_place: bool) -> None:
    """A tensor that is written shares no memory with itself or any other."""
    _check_no_self_overlap(c, "k_pool")
    _check_no_self_overlap(c, "v_pool")
    _check_no_overlap(c, "k_pool", "v_pool")
    for pool in ("k_pool", "v_pool"):
        for other in ("q", "k", "v", "positions", "slots"):
            _check_no_overlap(c, pool, other)
    if not in_place:
        return
    _check_no_self_overlap(c, "q")
    _check_no_self_overlap(c, "k")
    _check_no_overlap(c, "q", "k")
    for written in ("q", "k"):
        for other in ("v", "positions", "slots"):
            _check_no_overlap(c, written, other)


def _check_no_self_overlap(c: Call, name: str) -> None:
    view = _View.of(getattr(c, name))
    if view is not None:
        found = LIBRARY.rope_pool_self_overlap(*view.c_geometry())
        _fail_if_overlap(found, f"{name} must not overlap itself")


def _check_no_overlap(c: Call, written: str, other: str) -> None:
    a, b = _View.of(getattr(c, written)), _View.of(getattr(c, other))
    if a is not None and b is not None and a.storage == b.storage:
        found = LIBRARY.rope_pool_overlap(
            ctypes.c_uint64(a.offset), *a.c_geometry(), ctypes.c_uint64(b.offset), *b.c_geometry()
        )
        _fail_if_overlap(found, f"{written} and {other} must not overlap")


def _fail_if_overlap(found: int, text: str) -> None:
    if found == 2:
        text += ", which 1000 steps of search could not rule out for these strides"
    if found != 0:
        raise ValueError(text)


def _check_inv_freq(c: Call, in_place: bool) -> None:
    if (c.rope_base is None) == (c.inv_freq is None):
        given = "neither" if c.rope_base is None else "both"
        raise ValueError(f"exactly one of rope_base and inv_freq must be given, got {given}")
    if c.inv_freq is None:
        return
    text = f"inv_freq shape must be [rotary_dim / 2], got {_shape(c.inv_freq)} with rotary_dim {c.turned_dim}"
    _require(c.inv_freq.dim() == 1, text)
    _require(c.inv_freq.shape[0] == c.turned_dim // 2, text)
    allows_float64 = c.q.device.type != "mps"
    if c.inv_freq.dtype != torch.float32 and not (allows_float64 and c.inv_freq.dtype == torch.float64):
        allowed = "float32 or float64" if allows_float64 else "float32"
        raise ValueError(f"inv_freq must be {allowed}, got {_dtype(c.inv_freq)}")
    if c.inv_freq.device.type != "cpu":
        _check_device(c, "inv_freq", c.inv_freq)
    _check_storage("inv_freq", c.inv_freq)
    for written in ("k_pool", "v_pool", *(("q", "k") if in_place else ())):
        _check_no_overlap(c, written, "inv_freq")


def _check_rotary_dim(c: Call) -> None:
    if c.rotary_dim is None:
        return
    text = (
        f"rotary_dim must be even, at least 2 and at most head_dim, got {c.rotary_dim} "
        f"with head_dim {c.head_dim}"
    )
    _require(c.rotary_dim % 2 == 0, text)
    _require(c.rotary_dim >= 2, text)
    _require(c.rotary_dim <= c.head_dim, text)


def _check_page_size(c: Call) -> None:
    if c.page_size is None:
        return
    text = (
        f"page_size must be k_pool.shape[1] and at least 1, got {c.page_size} with k_pool {_shape(c.k_pool)}"
    )
    _require(c.page_size >= 1, text)
    _require(c.page_size == c.k_pool.shape[1], text)


def _check_mrope(c: Call) -> None:
    if c.mrope_section is None:
        if c.mrope_interleaved:
            raise ValueError("mrope_interleaved needs mrope_section")
        return
    text = (
        f"mrope_section must be 3 counts that sum up to rotary_dim / 2, got {list(c.mrope_section)} "
        f"with rotary_dim {c.turned_dim}"
    )
    _require(len(c.mrope_section) == 3, text)
    _require(min(c.mrope_section) >= 0, text)
    _require(sum(c.mrope_section) == c.turned_dim // 2, text)


def _pin_symbolic_offset(name: str, pool: Tensor) -> None:
    """Makes a pool's place in its buffer a constant of the graph where its offset is symbolic.

    Inductor drops a symbolic storage offset of a mutated view, and would then write every layer's rows
    into the first layer's (pytorch#198068). Pinning the offset alone leaves some expressions symbolic;
    pinning the sizes and strides that it is made of does not.
    """
    if not isinstance(pool.storage_offset(), torch.SymInt):
        return
    for number in (*pool.shape, *pool.stride(), pool.storage_offset()):
        int(number)
    offset = pool.storage_offset()
    if isinstance(offset, torch.SymInt) and offset.node.maybe_as_int() is None:
        raise ValueError(
            f"{name} is a view at a storage offset that this graph does not know ({offset}), which torch "
            f"compiles to a write at the wrong place: give each layer's {name} a storage of its own"
        )


COPIES_SHARED_INPUTS = TorchVersion(torch.__version__) < "2.13"


def _refuse_two_bases(c: Call) -> None:
    """Refuses pools that share a storage and that torch would functionalize apart.

    It copies the base of each tensor that is written, and copies them back one after the other: of two
    bases with the same memory, the first one's rows are lost. Two graph inputs are two bases as well; with
    them only AOTInductor goes wrong, and before torch 2.13 all of Inductor: it copies the second from
    memory that need not be there at run time.
    """
    pools = [pool for pool in (c.k_pool, c.v_pool) if isinstance(pool, FunctionalTensor)]
    if len(pools) < 2:
        return
    bases = [pool if get_base(pool) is None else get_base(pool) for pool in pools]
    if bases[0] is bases[1]:
        return
    if _storage(pools[0]) == _storage(pools[1]):
        raise ValueError(
            "k_pool and v_pool are views of one buffer by way of different tensors, of which torch would "
            "lose one's rows: take both as views of the same tensor, with no detach() in between"
        )
    inductor = sys.modules.get("torch._inductor.virtualized")
    if not COPIES_SHARED_INPUTS and (inductor is None or not inductor.V.aot_compilation):
        return
    inputs = [torch._from_functional_tensor(pool.elem) for pool in pools]
    if _storage(inputs[0]) == _storage(inputs[1]):
        raise ValueError(
            "k_pool and v_pool share a storage and are two inputs of the graph, of which Inductor would "
            "copy one: give each a storage of its own, as clone() does, or take both inside the graph as "
            "views of one input"
        )


def _storage(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


# ---- Registration

_LIB = torch.library.Library("ropepool", "IMPL")


@torch.library.register_fake("ropepool::_rope_pool_fused", lib=_LIB)
def _rope_pool_fused_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = Call(*args, **kwargs)
    require_no_grad(call)
    check_contract(call, in_place=False)
    _pin_symbolic_offset("k_pool", call.k_pool)
    _pin_symbolic_offset("v_pool", call.v_pool)
    return call.q.new_empty(call.q.shape), call.k.new_empty(call.k.shape)


# What tracing sees of the other two ops: the primitive, which returns no alias and mutates nothing but
# the pools, so that functionalization can handle it. Eager calls on a backend run its compiled kernels.


def _primitive(call: Call, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    try:
        q_rot, k_rot = torch.ops.ropepool._rope_pool_fused(*args, **kwargs)
    except NotImplementedError as error:
        if "Could not run" not in str(error):  # a tensor subclass has reasons of its own
            raise
        raise NotImplementedError(
            f"torch_ropepool has no kernel here for tensors on {call.q.device}: "
            "`python -m torch_ropepool` says what it has kernels for"
        ) from error
    return q_rot, k_rot


def _rope_pool_fused_composite(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = Call(*args, **kwargs)
    require_no_grad(call)
    check_contract(call, in_place=False)
    _refuse_two_bases(call)
    q_rot, k_rot = _primitive(call, *args, **kwargs)
    return q_rot, k_rot, call.k_pool, call.v_pool


def _rope_pool_fused_inplace_composite(*args: Any, **kwargs: Any) -> None:
    call = Call(*args, **kwargs)
    require_no_grad(call)
    check_contract(call, in_place=True)
    _refuse_two_bases(call)
    q_rot, k_rot = _primitive(call, *args, **kwargs)
    call.q.copy_(q_rot)
    call.k.copy_(k_rot)


_LIB.impl("rope_pool_fused", _rope_pool_fused_composite, "CompositeImplicitAutograd")
_LIB.impl("rope_pool_fused_", _rope_pool_fused_inplace_composite, "CompositeImplicitAutograd")
