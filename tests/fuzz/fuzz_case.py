"""Random calls of the ops, valid and broken, in memory of which every byte is known."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import test_contract_parity as parity
import torch
from sample import OPS, TENSOR_NAMES, CallSpec, Sample, contiguous_strides, make_spec
from torch import Tensor

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GUARD = 64  # bytes before and after each buffer
FLOATS = ("normal", "normal", "bits", "special", "subnormal", "largest")
INDICES = ("distinct", "distinct", "repeated", "negative", "edges", "beyond")
INT_EDGES = (0, 1, -1, 2**31 - 1, -(2**31), 2**31, 2**32, 2**53 + 1, 2**63 - 1, -(2**63), -(2**63) + 1)


@dataclass
class Case:
    op: str
    spec: CallSpec
    values: tuple[str, str, str]  # how floats, positions and slots are filled
    seed: int  # of the values
    alignment: int  # of each buffer: it begins so many bytes after a multiple of 64
    odd: tuple[str, str] | None = None  # an argument, and what it is replaced by

    @property
    def start(self) -> int:
        """Of each buffer, in the memory that it is a part of."""
        return GUARD + self.alignment

    @cached_property
    def buffers(self) -> dict[str, tuple[int, str, int | None]]:
        """Of each buffer: how many bytes it has, its device, and what it is cut to."""
        result: dict[str, tuple[int, str, int | None]] = {}
        for view in self.spec.views.values():
            size = max(result.get(view.buffer, (0,))[0], -(-view.end // 16) * 16)
            result[view.buffer] = size, view.device, view.storage_bytes
        return result

    def __str__(self) -> str:
        lines = [f"{self.op} {self.spec.kwargs}"]
        lines += [f"values {self.values} of seed {self.seed}, alignment {self.alignment}, odd {self.odd}"]
        return "\n  ".join([*lines, *(f"{name}: {view}" for name, view in self.spec.views.items())])


# ---- Drawing one. `r` is Hypothesis's, so that what fails shrinks: prefer the first of a choice.


def huge_stride(r: random.Random, spec: CallSpec) -> None:
    """Of a dimension that has one element, or of a tensor that has none."""
    view = spec.views[r.choice(TENSOR_NAMES)]
    strides = list(contiguous_strides(view.shape) if view.strides is None else view.strides)
    for d, size in enumerate(view.shape):
        if size == 1 or 0 in view.shape:
            strides[d] = r.choice([0, 2**31, 2**40, 2**61, 2**62 - 1, 2**63 - 1])
    view.strides = tuple(strides)


def huge_offset(r: random.Random, spec: CallSpec) -> None:
    view = spec.views[r.choice(TENSOR_NAMES)]
    if 0 in view.shape:
        view.offset = r.choice([1, 2**31, 2**40, 2**60])


def more_tokens_than_memory(r: random.Random, spec: CallSpec) -> None:
    """Expanded, so that they take none."""
    row = max(math.prod(spec.views[name].shape[1:]) for name in TENSOR_NAMES[:5])
    many = r.choice([2**41, 2**50, (2**63 - 1) // max(row, 1)])  # torch counts elements in int64
    for name in TENSOR_NAMES[:5]:
        view = spec.views[name]
        if len(view.shape) == 0 or (name == "positions" and len(view.shape) == 2):
            continue
        view.shape = (many, *view.shape[1:])
        view.strides = (0, *contiguous_strides(view.shape)[1:])


def extreme_keyword(r: random.Random, spec: CallSpec) -> None:
    name = r.choice(["head_dim", "num_qo_heads", "num_kv_heads", "rotary_dim", "page_size", "mrope_section"])
    number = r.choice([2**31, -(2**31), 2**32, 2**62, 2**63 - 1, -(2**63)])
    section = [number, r.choice([0, 1, number, -number % 2**63]), r.choice([0, 1, number])]
    spec.kwargs[name] = section if name == "mrope_section" else number


LEGAL = [parity.transposed, parity.spread, parity.offset, parity.interleaved, huge_stride]
BROKEN = [huge_offset, more_tokens_than_memory, extreme_keyword]


def sized_spec(r: random.Random) -> CallSpec:
    """A good call of any dtype and layout, with head_dims on every side of a vector's width."""
    head_dim = r.choice([2, 4, 8, 16, 20, 64, 66, 72, 80, 128, 258])
    tokens = [1, 2, 0, 3, 5, 8, 17] if head_dim <= 20 else [1, 2, 3]
    spec = make_spec(
        num_tokens=r.choice(tokens),
        num_qo_heads=r.choice([1, 2, 3, 4]),
        num_kv_heads=r.choice([1, 2, 3]),
        head_dim=head_dim,
        pool_size=r.choice([1, 4, 0, 9, 20] if head_dim <= 20 else [1, 4]),
        dtype=r.choice(FLOAT_DTYPES[2:3] + FLOAT_DTYPES),
        rope_base=r.choice([1e4, 5e5, 1.0, 1e-3]),
    )
    for name in ("positions", "slots"):
        spec.views[name].dtype = r.choice([torch.int32, torch.int64])
    for mutation in r.choices(parity.VARIANTS, k=r.choice([0, 1, 2])):
        mutation(r, spec)
    for mutation in r.choices(LEGAL, k=r.choice([0, 1, 2, 3])):
        mutation(r, spec)
    if r.random() > 0.9:
        r.choice(BROKEN)(r, spec)
    parity.share_buffers(spec)
    return spec


def draw(r: random.Random) -> Case:
    case = Case(
        op=r.choice(list(OPS)),
        spec=r.choice([sized_spec, sized_spec, parity.random_spec])(r),
        values=(r.choice(FLOATS), r.choice(INDICES), r.choice(INDICES)),
        seed=r.randrange(2**16),
        alignment=r.choice([0, 8, 16, 24]),
    )
    if r.random() > 0.9:
        case.odd = r.choice(TENSOR_NAMES), r.choice(list(ODDITIES))
    return case


# ---- Memory


class Placed:
    """A call's tensors, and all bytes of the memory that they are views of."""

    def __init__(self, case: Case, contents: dict[str, Tensor], *, cut: bool = True) -> None:
        self.memory: dict[str, Tensor] = {}  # of each buffer, guards included
        buffers = {}
        for name, (size, device, storage_bytes) in case.buffers.items():
            if device == "meta":
                buffers[name] = torch.empty(size, dtype=torch.uint8, device=device)
            elif storage_bytes is not None and cut:  # memory of torch's, or it could not be resized
                buffers[name] = contents[name][case.start :][:size].clone()
            else:
                memory = contents[name].clone()
                # A storage of these bytes and no more.
                buffers[name] = torch.from_numpy(memory.numpy()[case.start :][:size])
                self.memory[name] = memory
        self.flat = {name: buffers[view.buffer].view(view.dtype) for name, view in case.spec.views.items()}
        tensors = {}
        for name, view in case.spec.views.items():
            strides = contiguous_strides(view.shape) if view.strides is None else view.strides
            tensors[name] = self.flat[name].as_strided(view.shape, strides, view.offset)
        for name, (size, device, storage_bytes) in case.buffers.items():
            if device == "cpu" and storage_bytes is not None and cut:
                storage = buffers[name].untyped_storage()
                storage.resize_(storage_bytes)
                self.memory[name] = torch.empty(0, dtype=torch.uint8).set_(storage)
                self.memory[name][size:] = 0
        arguments = {name: tensors.pop(name) for name in TENSOR_NAMES}
        self.call = Sample(**arguments, kwargs={**case.spec.kwargs, **tensors})

    def image(self) -> dict[str, Tensor]:
        return {name: memory.clone() for name, memory in self.memory.items()}


def fill(case: Case) -> dict[str, Tensor]:
    """The contents of each buffer: random bits, and in the tensors the values that the case asks for."""
    g = torch.Generator().manual_seed(case.seed)
    contents = {
        name: torch.randint(256, (size + 2 * GUARD + 64,), generator=g, dtype=torch.uint8)
        for name, (size, _, _) in case.buffers.items()
    }
    placed = Placed(case, contents, cut=False)
    floats, positions, slots = case.values
    rows = placed.call.k_pool.shape[:-2].numel() if placed.call.k_pool.dim() > 2 else 1
    for name, view in case.spec.views.items():
        if view.device != "cpu" or placed.flat[name].numel() == 0:
            continue
        tensor = getattr(placed.call, name) if name in TENSOR_NAMES else placed.call.kwargs[name]
        shape = torch.Size((1, *tensor.shape[1:])) if tensor.numel() > 2**30 else tensor.shape
        if name == "inv_freq" and view.dtype in FLOAT_DTYPES:
            values = inverse_frequencies(tensor.shape.numel(), floats, g)
        elif view.dtype in FLOAT_DTYPES:
            values = floats_of(shape.numel(), view.dtype, floats, g)
        elif view.dtype in (torch.int32, torch.int64):
            values = indices_of(shape.numel(), positions if name == "positions" else slots, rows, g)
            if name == "slots":  # never where there is no such row, unless the case says so
                values = values if slots == "beyond" else values.where(values < rows, -1)
            limits = torch.iinfo(view.dtype)
            values = values.clamp(limits.min, limits.max)
        else:
            continue
        if values is not None:
            elements = torch.arange(len(placed.flat[name])).as_strided(
                shape, tensor.stride(), tensor.storage_offset()
            )
            placed.flat[name][elements.flatten()] = values.to(view.dtype)
    return placed.image()


def floats_of(count: int, dtype: torch.dtype, kind: str, g: torch.Generator) -> Tensor | None:
    if kind == "bits":
        return None  # as they are: infinities, NaNs of every payload
    if kind == "normal":
        return torch.randn(count, generator=g)
    info = torch.finfo(dtype)
    if kind == "special":
        numbers = [0.0, -0.0, info.max, info.min, info.tiny, 1.0, float("inf"), -float("inf"), float("nan")]
        return torch.tensor(numbers, dtype=torch.float64)[torch.randint(9, (count,), generator=g)]
    scale = info.max if kind == "largest" else 8 * info.tiny
    return (2 * torch.rand(count, generator=g, dtype=torch.float64) - 1) * scale


def inverse_frequencies(count: int, kind: str, g: torch.Generator) -> Tensor | None:
    if kind == "bits":
        return None
    edges = torch.tensor([1.0, -0.25, 0.0, 1e-38, 1e-45, 3e38, 1e10, 0.1], dtype=torch.float64)
    edges[7] = float("nan") if kind == "special" else 0.1
    return edges[torch.randint(8, (count,), generator=g)]


def indices_of(count: int, kind: str, rows: int, g: torch.Generator) -> Tensor:
    if kind == "distinct":
        some = torch.randperm(rows, generator=g)[:count]
        return torch.cat([some, torch.full((count - len(some),), -1)])
    if kind == "repeated":
        return torch.randint(-1, max(rows, 1), (count,), generator=g)
    if kind == "negative":
        return torch.randint(-(2**40), 0, (count,), generator=g)
    edges = torch.tensor([*INT_EDGES, rows - 1, rows, rows + 1])
    if kind == "edges":
        return edges[torch.randint(len(edges), (count,), generator=g)]
    values = torch.randint(-1, max(rows, 1), (count,), generator=g)
    at = torch.randint(max(count, 1), (1,), generator=g)
    return (
        values.index_fill(0, at, int(edges[torch.randint(len(edges), (1,), generator=g)]))
        if count
        else values
    )


# ---- Arguments that are no plain tensors


class Subclass(Tensor):
    pass


def requiring_grad(t: Tensor) -> Any:
    return t.detach().requires_grad_() if t.is_floating_point() else t.double().requires_grad_()


# All are refused but for the subclass.
ODDITIES: dict[str, Any] = {
    "sparse_coo": lambda t: t.to_sparse(),
    "mkldnn": lambda t: t.float().to_mkldnn(),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "nested": lambda t: torch.nested.nested_tensor([t.float()]),
    "jagged": lambda t: torch.nested.nested_tensor([t.float().reshape(-1)], layout=torch.jagged),
    "conjugate": lambda t: torch.complex(t.float(), t.float()).conj(),
    "imaginary": lambda t: torch.complex(t.float(), t.float()).conj().imag,  # a lazily negated view
    "negated": lambda t: torch._neg_view(t),
    "complex": lambda t: t.to(torch.complex64),
    "bool": lambda t: t.bool(),
    "meta": lambda t: t.to("meta"),
    "requires_grad": requiring_grad,
    "parameter_child": lambda t: requiring_grad(t) * 1,
    "none": lambda t: None,
    "list": lambda t: [1.0, 2.0],
    "number": lambda t: 3,
    "numpy": lambda t: torch.zeros(3).numpy(),
    "subclass": lambda t: t.as_subclass(Subclass),
}


def replaced(case: Case, call: Sample) -> Sample:
    """The call with the argument that is odd."""
    assert case.odd is not None
    name, how = case.odd
    return call.with_(**{name: ODDITIES[how](getattr(call, name))})
