"""Broken calls: which error, with which text, from every way of calling the three ops."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from sample import OPS, TENSOR_NAMES, CallSpec, Sample, make_sample, make_spec
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

CASES = json.loads((Path(__file__).parent / "data" / "contract.json").read_text())
FLOATS = ("q", "k", "v", "k_pool", "v_pool")


class Call(torch.nn.Module):
    def __init__(self, op: str, kwargs: dict) -> None:
        super().__init__()
        self.op = OPS[op]
        self.kwargs = {name: value for name, value in kwargs.items() if not isinstance(value, torch.Tensor)}

    def forward(self, q, k, v, positions, slots, k_pool, v_pool, inv_freq=None):
        given = {} if inv_freq is None else {"inv_freq": inv_freq}
        return self.op(q, k, v, positions, slots, k_pool, v_pool, **given, **self.kwargs)


def as_fake(sample: Sample) -> Sample:
    return sample.map(FakeTensorMode().from_tensor)


def run_cpu_kernel(op: str, s: Sample) -> None:
    """The compiled CPU kernel, even where torch would choose that of another tensor's device."""
    OPS[op].default._op_dk(torch._C.DispatchKey.CPU, *s.args, **s.kwargs)


def run_make_fx(op: str, s: Sample, mode: str) -> None:
    make_fx(Call(op, s.kwargs), tracing_mode=mode)(*s.tensors)


def run_export(op: str, s: Sample, strict: bool) -> None:
    torch.export.export(Call(op, s.kwargs), s.tensors, strict=strict)


def run_compile(op: str, s: Sample, backend: str) -> None:
    torch._dynamo.reset()
    torch.compile(Call(op, s.kwargs), backend=backend)(*s.tensors)


# Ways of calling an op that raise the contract's own error.
PLAIN_WAYS: dict[str, Callable[[str, Sample], object]] = {
    "cpu": lambda op, s: s.run(op),
    "cpu kernel": run_cpu_kernel,
    "meta": lambda op, s: s.map(lambda t: t.to("meta")).run(op),
    "fake": lambda op, s: as_fake(s).run(op),
    "make_fx real": lambda op, s: run_make_fx(op, s, "real"),
    "make_fx fake": lambda op, s: run_make_fx(op, s, "fake"),
    "export": lambda op, s: run_export(op, s, strict=False),
}
# Ways that wrap it in PyTorch's own.
WRAPPING_WAYS: dict[str, Callable[[str, Sample], object]] = {
    "compile eager": lambda op, s: run_compile(op, s, "eager"),
    "compile aot_eager": lambda op, s: run_compile(op, s, "aot_eager"),
    "strict export": lambda op, s: run_export(op, s, strict=True),
}


def error_of(call: Callable[[], object]) -> tuple[str, str] | None:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


# ---- contract.json


def case_sample(case: dict) -> Sample:
    spec = make_spec()
    for key, value in case["change"].items():
        name = key.removesuffix("_dtype")
        if key in spec.kwargs:
            spec.kwargs[key] = value
        elif key in TENSOR_NAMES:
            spec.views[key].shape = tuple(value)
        else:
            spec.views[name].dtype = getattr(torch, value)
    return spec.build()


each_case = pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
each_op = pytest.mark.parametrize("op", OPS)


@each_op
@pytest.mark.parametrize("way", PLAIN_WAYS)
@each_case
def test_case_raises_the_same_everywhere(case: dict, way: str, op: str) -> None:
    sample = case_sample(case)
    expected = error_of(lambda: sample.run("rope_pool_fused"))
    assert expected is not None and expected[1].startswith(case["starts"])
    assert expected[0] == "ValueError"
    assert error_of(lambda: PLAIN_WAYS[way](op, sample)) == expected


@each_op
@each_case
def test_case_raises_on_symbolic_shapes(case: dict, op: str) -> None:
    sample = case_sample(case)
    kind, text = error_of(lambda: sample.run(op))
    symbolic_kind, symbolic_text = error_of(lambda: run_make_fx(op, sample, "symbolic"))
    assert symbolic_kind == kind

    def no_sizes(text: str) -> str:
        """Hints are only given for known sizes."""
        return re.sub(r"\b[su]?\d+\b", "N", text.split("\nhint: ")[0])

    assert no_sizes(symbolic_text) == no_sizes(text)


@each_op
@pytest.mark.parametrize("way", WRAPPING_WAYS)
@each_case
def test_case_text_is_inside_the_error_of_compile(case: dict, way: str, op: str) -> None:
    sample = case_sample(case)
    _, text = error_of(lambda: sample.run(op))
    _, wrapped = error_of(lambda: WRAPPING_WAYS[way](op, sample))
    assert repr(text)[1:-1] in wrapped  # PyTorch prints the error's repr


# ---- Every message

UNDECIDED_STRIDES = (1271, 5259, 766)  # of a [128, 16, 64] pool: no overlap, but hard to see
Change = Callable[[CallSpec], CallSpec | None]


def shape(**shapes: tuple[int, ...]) -> Change:
    def change(spec: CallSpec) -> None:
        for name, value in shapes.items():
            spec.views[name].shape = value

    return change


def dtype(**dtypes: str) -> Change:
    def change(spec: CallSpec) -> None:
        for name, value in dtypes.items():
            spec.views[name].dtype = getattr(torch, value)

    return change


def float_dtypes(value: str) -> Change:
    return dtype(**dict.fromkeys(FLOATS, value))


def sizes(**sizes: int) -> Change:
    """Another model, whose tensors all have the right shapes."""
    return lambda spec: make_spec(**sizes)


def keyword(**kwargs: float) -> Change:
    return lambda spec: spec.kwargs.update(kwargs)


def on_meta(*names: str) -> Change:
    def change(spec: CallSpec) -> None:
        for name in names:
            spec.views[name].device = "meta"

    return change


def storage_bytes(**sizes: int) -> Change:
    def change(spec: CallSpec) -> None:
        for name, value in sizes.items():
            spec.views[name].storage_bytes = value

    return change


def strides(**strides: tuple[int, ...]) -> Change:
    def change(spec: CallSpec) -> None:
        for name, value in strides.items():
            spec.views[name].strides = value

    return change


def inside(guest: str, host: str, offset: int = 0) -> Change:
    """Puts the guest into the host's storage, at an offset in elements of the guest."""

    def change(spec: CallSpec) -> None:
        view = spec.views[guest]
        view.buffer, view.offset = spec.views[host].buffer, spec.views[host].offset + offset

    return change


def both(*changes: Change) -> Change:
    def change(spec: CallSpec) -> CallSpec:
        for each in changes:
            spec = each(spec) or spec
        return spec

    return change


BROKEN_ARGUMENTS: dict[str, Change] = {
    # ranks
    "q packed": shape(q=(4, 512)),
    "k packed": shape(k=(4, 128)),
    "v packed": shape(v=(4, 128)),
    "q 2-D": shape(q=(4, 64)),
    "q with a batch": shape(q=(1, 4, 8, 64)),
    "k with a batch": shape(k=(2, 2, 2, 64)),
    "q 4-D": shape(q=(4, 8, 64, 1)),
    "v 1-D": shape(v=(4,)),
    "q 0-D": shape(q=()),
    "k 5-D": shape(k=(1, 1, 4, 2, 64)),
    "positions 2-D": shape(positions=(1, 4)),
    "slots 0-D": shape(slots=()),
    "k_pool packed": shape(k_pool=(128, 128)),
    "v_pool paged": shape(v_pool=(8, 16, 2, 64)),
    "v_pool 1-D": shape(v_pool=(128,)),
    # shapes
    "swapped head counts": keyword(num_qo_heads=2, num_kv_heads=8),
    "q heads": shape(q=(4, 7, 64)),
    "q head_dim": shape(q=(4, 8, 32)),
    "head_dim of another model": keyword(head_dim=128),
    "negative head_dim": keyword(head_dim=-64),
    "q tokens": shape(q=(3, 8, 64)),
    "k tokens": shape(k=(5, 2, 64)),
    "k heads": shape(k=(4, 8, 64)),
    "k head_dim": shape(k=(4, 2, 32)),
    "v tokens": shape(v=(5, 2, 64)),
    "v heads": shape(v=(4, 1, 64)),
    "v head_dim": shape(v=(4, 2, 32)),
    "positions length": shape(positions=(3,)),
    "slots length": shape(slots=(1,)),
    "k_pool heads": shape(k_pool=(128, 4, 64)),
    "k_pool head_dim": shape(k_pool=(128, 2, 128)),
    "v_pool rows": shape(v_pool=(64, 2, 64)),
    "v_pool heads": shape(v_pool=(128, 4, 64)),
    "v_pool head_dim": shape(v_pool=(128, 2, 32)),
    # dtypes
    "k dtype": dtype(k="bfloat16"),
    "v dtype": dtype(v="float16"),
    "q dtype": dtype(q="float64"),
    "k_pool dtype": dtype(k_pool="bfloat16"),
    "v_pool dtype": dtype(v_pool="float16"),
    "both pools' dtype": dtype(k_pool="float8_e4m3fn", v_pool="float8_e4m3fn"),
    "all int32": float_dtypes("int32"),
    "all bool": float_dtypes("bool"),
    "all complex64": float_dtypes("complex64"),
    "all float8": float_dtypes("float8_e5m2"),
    "positions float32": dtype(positions="float32"),
    "positions uint8": dtype(positions="uint8"),
    "slots int16": dtype(slots="int16"),
    "slots uint64": dtype(slots="uint64"),
    # scalars
    "odd head_dim": sizes(head_dim=63),
    "head_dim 1": sizes(head_dim=1),
    "head_dim 0": sizes(head_dim=0),
    "no query heads": sizes(num_qo_heads=0),
    "no kv heads": sizes(num_kv_heads=0),
    "rope_base nan": keyword(rope_base=float("nan")),
    "rope_base -nan": keyword(rope_base=-float("nan")),
    "rope_base inf": keyword(rope_base=float("inf")),
    "rope_base -inf": keyword(rope_base=-float("inf")),
    "rope_base 0": keyword(rope_base=0.0),
    "rope_base -0": keyword(rope_base=-0.0),
    "rope_base -1": keyword(rope_base=-1.0),
    "rope_base -12345678": keyword(rope_base=-12345678.0),
}
BROKEN_DEVICES: dict[str, Change] = {
    "q on meta": on_meta("q"),
    "v on meta": on_meta("v"),
    "positions on meta": on_meta("positions"),
    "v_pool on meta": on_meta("v_pool"),
    "only slots on the CPU": on_meta("q", "k", "v", "positions", "k_pool", "v_pool"),
}
FREED_STORAGES: dict[str, Change] = {
    "q's storage is freed": storage_bytes(q=0),
    "slots' storage is freed": storage_bytes(slots=0),
    "v_pool's storage is freed": storage_bytes(v_pool=0),
}
# FakeTensorMode.from_tensor makes such storages whole again.
CUT_STORAGES: dict[str, Change] = {
    "k's storage lacks a byte": storage_bytes(k=4 * 2 * 64 * 4 - 1),
    "v's storage ends before its offset": both(inside("v", "v", offset=100), storage_bytes(v=400)),
}
OVERLAPS: dict[str, Change] = {
    "k_pool expanded": strides(k_pool=(0, 64, 1)),
    "k_pool strides too small": strides(k_pool=(127, 64, 1)),
    "k_pool undecided": both(sizes(num_kv_heads=16), strides(k_pool=UNDECIDED_STRIDES)),
    "v_pool expanded": strides(v_pool=(128, 0, 1)),
    "v_pool undecided": both(sizes(num_kv_heads=16), strides(v_pool=UNDECIDED_STRIDES)),
    "one pool twice": inside("v_pool", "k_pool"),
    "pools a row apart": inside("v_pool", "k_pool", offset=128),
    "pools share one element": inside("v_pool", "k_pool", offset=128 * 128 - 1),
    "q in k_pool": inside("q", "k_pool", offset=128),
    "k in k_pool": inside("k", "k_pool", offset=128),
    "v in k_pool": inside("v", "k_pool", offset=128),
    "positions in k_pool": inside("positions", "k_pool", offset=40),
    "slots in k_pool": inside("slots", "k_pool", offset=40),
    "q in v_pool": inside("q", "v_pool", offset=128),
    "k in v_pool": inside("k", "v_pool", offset=128),
    "v in v_pool": inside("v", "v_pool", offset=128),
    "positions in v_pool": both(dtype(positions="int64"), inside("positions", "v_pool", offset=40)),
    "slots in v_pool": inside("slots", "v_pool", offset=128 * 128 - 1),
    "q in k_pool undecided": both(
        sizes(num_kv_heads=4),
        strides(k_pool=(767, 8219, 594), q=(2672, 3451, 1474)),
        inside("q", "k_pool", offset=4314),
    ),
}
OVERLAPS_IN_PLACE: dict[str, Change] = {
    "q expanded": strides(q=(512, 0, 1)),
    "q strides too small": strides(q=(448, 64, 1)),
    "k expanded": strides(k=(0, 64, 1)),
    "k in q": inside("k", "q"),
    "k ends in q": both(inside("q", "k", offset=4 * 128 - 1)),
    "v in q": inside("v", "q"),
    "positions in q": inside("positions", "q"),
    "slots in q": inside("slots", "q", offset=4 * 512 - 4),
    "v is k": inside("v", "k"),
    "positions in k": inside("positions", "k", offset=8),
    "slots in k": both(dtype(slots="int64"), inside("slots", "k", offset=8)),
}
BROKEN = BROKEN_ARGUMENTS | BROKEN_DEVICES | FREED_STORAGES | CUT_STORAGES | OVERLAPS


def broken_spec(change: Change) -> CallSpec:
    spec = make_spec()
    return change(spec) or spec


def message_table(broken: dict[str, Change], op: str) -> str:
    """A call's name and, below it, the error's text, with long lines wrapped."""
    lines = []
    for name, change in broken.items():
        error = error_of(lambda change=change: run_cpu_kernel(op, broken_spec(change).build()))
        kind, text = error or ("no error", "")
        lines.append(name if kind == "ValueError" else f"{name}: {kind}")
        for line in text.splitlines():
            lines += textwrap.wrap(
                line, 104, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            )
    return "\n".join(lines)


def test_messages() -> None:
    assert_expected_inline(
        message_table(BROKEN, "rope_pool_fused"),
        """\
q packed
  rope_pool_fused expects q/k/v to be 3-D, got q [4, 512]
  hint: the heads of q are packed; pass q.view(4, 8, 64)
k packed
  rope_pool_fused expects q/k/v to be 3-D, got k [4, 128]
  hint: the heads of k are packed; pass k.view(4, 2, 64)
v packed
  rope_pool_fused expects q/k/v to be 3-D, got v [4, 128]
  hint: the heads of v are packed; pass v.view(4, 2, 64)
q 2-D
  rope_pool_fused expects q/k/v to be 3-D, got q [4, 64]
q with a batch
  rope_pool_fused expects q/k/v to be 3-D, got q [1, 4, 8, 64]
  hint: q has a batch dimension; pass q.flatten(0, 1)
k with a batch
  rope_pool_fused expects q/k/v to be 3-D, got k [2, 2, 2, 64]
  hint: k has a batch dimension; pass k.flatten(0, 1)
q 4-D
  rope_pool_fused expects q/k/v to be 3-D, got q [4, 8, 64, 1]
v 1-D
  rope_pool_fused expects q/k/v to be 3-D, got v [4]
q 0-D
  rope_pool_fused expects q/k/v to be 3-D, got q []
k 5-D
  rope_pool_fused expects q/k/v to be 3-D, got k [1, 1, 4, 2, 64]
positions 2-D
  rope_pool_fused expects positions/slots to be 1-D, got positions [1, 4]
slots 0-D
  rope_pool_fused expects positions/slots to be 1-D, got slots []
k_pool packed
  rope_pool_fused expects pool tensors to be 3-D, got k_pool [128, 128]
  hint: the heads of k_pool are packed; pass k_pool.view(128, 2, 64)
v_pool paged
  rope_pool_fused expects pool tensors to be 3-D, got v_pool [8, 16, 2, 64]
  hint: for a paged pool, pass page_size=16
v_pool 1-D
  rope_pool_fused expects pool tensors to be 3-D, got v_pool [128]
swapped head counts
  q shape must be [num_tokens, num_qo_heads, head_dim], got [4, 8, 64] with num_qo_heads 2, head_dim 64
  hint: num_qo_heads and num_kv_heads look swapped
q heads
  q shape must be [num_tokens, num_qo_heads, head_dim], got [4, 7, 64] with num_qo_heads 8, head_dim 64
q head_dim
  q shape must be [num_tokens, num_qo_heads, head_dim], got [4, 8, 32] with num_qo_heads 8, head_dim 64
head_dim of another model
  q shape must be [num_tokens, num_qo_heads, head_dim], got [4, 8, 64] with num_qo_heads 8, head_dim 128
negative head_dim
  q shape must be [num_tokens, num_qo_heads, head_dim], got [4, 8, 64] with num_qo_heads 8, head_dim -64
q tokens
  k shape must be [num_tokens, num_kv_heads, head_dim], got [4, 2, 64] with num_tokens 3, num_kv_heads
    2, head_dim 64
k tokens
  k shape must be [num_tokens, num_kv_heads, head_dim], got [5, 2, 64] with num_tokens 4, num_kv_heads
    2, head_dim 64
k heads
  k shape must be [num_tokens, num_kv_heads, head_dim], got [4, 8, 64] with num_tokens 4, num_kv_heads
    2, head_dim 64
k head_dim
  k shape must be [num_tokens, num_kv_heads, head_dim], got [4, 2, 32] with num_tokens 4, num_kv_heads
    2, head_dim 64
v tokens
  v shape must match k shape, got [5, 2, 64] vs [4, 2, 64]
v heads
  v shape must match k shape, got [4, 1, 64] vs [4, 2, 64]
v head_dim
  v shape must match k shape, got [4, 2, 32] vs [4, 2, 64]
positions length
  positions/slots must have one entry per token, got positions [3], slots [4] for 4 tokens
slots length
  positions/slots must have one entry per token, got positions [4], slots [1] for 4 tokens
k_pool heads
  k_pool has incompatible shape [128, 4, 64]: must be [pool_size, num_kv_heads, head_dim] with
    num_kv_heads 2, head_dim 64
k_pool head_dim
  k_pool has incompatible shape [128, 2, 128]: must be [pool_size, num_kv_heads, head_dim] with
    num_kv_heads 2, head_dim 64
v_pool rows
  v_pool shape must match k_pool shape, got [64, 2, 64] vs [128, 2, 64]
v_pool heads
  v_pool shape must match k_pool shape, got [128, 4, 64] vs [128, 2, 64]
v_pool head_dim
  v_pool shape must match k_pool shape, got [128, 2, 32] vs [128, 2, 64]
k dtype
  q/k/v dtypes must match, got q float32, k bfloat16, v float32
v dtype
  q/k/v dtypes must match, got q float32, k float32, v float16
q dtype
  q/k/v dtypes must match, got q float64, k float32, v float32
k_pool dtype
  pool dtypes must match q/k/v dtype, got k_pool bfloat16, v_pool float32 with q/k/v float32
v_pool dtype
  pool dtypes must match q/k/v dtype, got k_pool float32, v_pool float16 with q/k/v float32
both pools' dtype
  pool dtypes must match q/k/v dtype, got k_pool float8_e4m3fn, v_pool float8_e4m3fn with q/k/v float32
all int32
  q/k/v dtype must be float16, bfloat16 or float32, got int32
all bool
  q/k/v dtype must be float16, bfloat16 or float32, got bool
all complex64
  q/k/v dtype must be float16, bfloat16 or float32, got complex64
all float8
  q/k/v dtype must be float16, bfloat16 or float32, got float8_e5m2
positions float32
  positions/slots must be int32 or int64, got positions float32
positions uint8
  positions/slots must be int32 or int64, got positions uint8
slots int16
  positions/slots must be int32 or int64, got slots int16
slots uint64
  positions/slots must be int32 or int64, got slots uint64
odd head_dim
  head_dim must be even and at least 2, got 63
head_dim 1
  head_dim must be even and at least 2, got 1
head_dim 0
  head_dim must be even and at least 2, got 0
no query heads
  num_qo_heads must be at least 1, got 0
no kv heads
  num_kv_heads must be at least 1, got 0
rope_base nan
  rope_base must be finite and positive, got nan
rope_base -nan
  rope_base must be finite and positive, got nan
rope_base inf
  rope_base must be finite and positive, got inf
rope_base -inf
  rope_base must be finite and positive, got -inf
rope_base 0
  rope_base must be finite and positive, got 0
rope_base -0
  rope_base must be finite and positive, got -0
rope_base -1
  rope_base must be finite and positive, got -1
rope_base -12345678
  rope_base must be finite and positive, got -1.23457e+07
q on meta
  all tensors must be on one device, got q on meta, k on cpu
v on meta
  all tensors must be on one device, got q on cpu, v on meta
positions on meta
  all tensors must be on one device, got q on cpu, positions on meta
v_pool on meta
  all tensors must be on one device, got q on cpu, v_pool on meta
only slots on the CPU
  all tensors must be on one device, got q on meta, slots on cpu
q's storage is freed
  q needs a storage of 8192 bytes, got one of 0
slots' storage is freed
  slots needs a storage of 16 bytes, got one of 0
v_pool's storage is freed
  v_pool needs a storage of 65536 bytes, got one of 0
k's storage lacks a byte
  k needs a storage of 2048 bytes, got one of 2047
v's storage ends before its offset
  v needs a storage of 2448 bytes, got one of 400
k_pool expanded
  k_pool must not overlap itself
k_pool strides too small
  k_pool must not overlap itself
k_pool undecided
  k_pool must not overlap itself, which 1000 steps of search could not rule out for these strides
v_pool expanded
  v_pool must not overlap itself
v_pool undecided
  v_pool must not overlap itself, which 1000 steps of search could not rule out for these strides
one pool twice
  k_pool and v_pool must not overlap
pools a row apart
  k_pool and v_pool must not overlap
pools share one element
  k_pool and v_pool must not overlap
q in k_pool
  k_pool and q must not overlap
k in k_pool
  k_pool and k must not overlap
v in k_pool
  k_pool and v must not overlap
positions in k_pool
  k_pool and positions must not overlap
slots in k_pool
  k_pool and slots must not overlap
q in v_pool
  v_pool and q must not overlap
k in v_pool
  v_pool and k must not overlap
v in v_pool
  v_pool and v must not overlap
positions in v_pool
  v_pool and positions must not overlap
slots in v_pool
  v_pool and slots must not overlap
q in k_pool undecided
  k_pool and q must not overlap, which 1000 steps of search could not rule out for these strides""",
    )


def test_messages_of_the_in_place_op() -> None:
    assert_expected_inline(
        message_table(OVERLAPS_IN_PLACE, "rope_pool_fused_"),
        """\
q expanded
  q must not overlap itself
q strides too small
  q must not overlap itself
k expanded
  k must not overlap itself
k in q
  q and k must not overlap
k ends in q
  q and k must not overlap
v in q
  q and v must not overlap
positions in q
  q and positions must not overlap
slots in q
  q and slots must not overlap
v is k
  k and v must not overlap
positions in k
  k and positions must not overlap
slots in k
  k and slots must not overlap""",
    )


# Which calls each way of calling must refuse as the CPU kernel does.
GROUPS = {
    "arguments": BROKEN_ARGUMENTS,
    "devices": BROKEN_DEVICES,
    "freed storages": FREED_STORAGES,
    "cut storages": CUT_STORAGES,
    "overlaps": OVERLAPS,
}
CANNOT_SEE = [("meta", "devices"), *((way, "cut storages") for way in ("fake", "make_fx fake", "export"))]
SLOW_WAYS = ("make_fx real", "make_fx fake", "export")
WAYS_GROUPS_OPS = [
    (way, group, op)
    for way in PLAIN_WAYS
    for group in GROUPS
    for op in (["rope_pool_fused"] if way in SLOW_WAYS else OPS)
    if (way, group) not in [*CANNOT_SEE, ("export", "arguments")]  # those of contract.json do
]


def differences(way: str, op: str, broken: dict[str, Change]) -> dict[str, tuple]:
    """The calls whose error is not that of the CPU kernel."""
    found = {}
    for name, change in broken.items():
        spec = broken_spec(change)
        expected = error_of(lambda spec=spec: run_cpu_kernel(op, spec.build()))
        assert expected is not None and expected[0] == "ValueError", name
        if way == "meta":  # built there, since a copy to it shares no memory
            error = error_of(lambda spec=spec: spec.build("meta").run(op))
        else:
            error = error_of(lambda spec=spec: PLAIN_WAYS[way](op, spec.build()))
        if error != expected:
            found[name] = (error, expected)
    return found


@pytest.mark.parametrize(("way", "group", "op"), WAYS_GROUPS_OPS)
def test_broken_calls_raise_the_same_everywhere(way: str, group: str, op: str) -> None:
    assert differences(way, op, GROUPS[group]) == {}


@pytest.mark.parametrize("way", PLAIN_WAYS)
def test_overlaps_in_place_raise_the_same_everywhere(way: str) -> None:
    assert differences(way, "rope_pool_fused_", OVERLAPS_IN_PLACE) == {}


@pytest.mark.parametrize("op", ["rope_pool_fused", "_rope_pool_fused"])
def test_overlaps_of_read_tensors_are_legal_out_of_place(op: str) -> None:
    for change in OVERLAPS_IN_PLACE.values():
        spec = broken_spec(change)
        spec.build().run(op)
        as_fake(spec.build()).run(op)


def storage_of(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def changed_tensors(op: str, sample: Sample) -> list[str]:
    """Calls the op and says which tensors' storages have changed."""
    on_cpu = [name for name in TENSOR_NAMES if getattr(sample, name).device.type == "cpu"]
    before = {name: storage_of(getattr(sample, name)).clone() for name in on_cpu}
    error_of(lambda: run_cpu_kernel(op, sample))
    return [name for name in on_cpu if not torch.equal(before[name], storage_of(getattr(sample, name)))]


@each_op
def test_a_refused_call_writes_nothing(op: str) -> None:
    in_place = op == "rope_pool_fused_"
    legal = make_spec().build()
    assert changed_tensors(op, legal) == ["q", "k"] * in_place + ["k_pool", "v_pool"]
    for name, change in (BROKEN | OVERLAPS_IN_PLACE if in_place else BROKEN).items():
        assert changed_tensors(op, broken_spec(change).build()) == [], name


@each_op
@pytest.mark.parametrize("num_tokens", [1, 4, 300])
def test_a_slot_out_of_range_writes_nothing(num_tokens: int, op: str) -> None:
    sample = make_sample(num_tokens, pool_size=400)
    sample.slots[-1] = 400  # the others are valid
    with pytest.raises(IndexError) as error:
        sample.run(op)
    assert str(error.value) == (
        f"slots[{num_tokens - 1}] is 400, out of range for pool_size 400; a negative slot means: do not store"
    )
    assert changed_tensors(op, sample) == []


# ---- The order of the checks


def longer(name: str, d: int) -> Change:
    def change(spec: CallSpec) -> None:
        view = spec.views[name]
        view.shape = (*view.shape[:d], view.shape[d] + 1, *view.shape[d + 1 :])

    return change


def deeper(name: str) -> Change:
    def change(spec: CallSpec) -> None:
        view = spec.views[name]
        view.shape = (*view.shape, 1)
        view.strides = view.strides and (*view.strides, 1)

    return change


def resized(keyword: str, d: int, size: int, *names: str) -> Change:
    """Another head_dim or head count, that all tensors agree on."""

    def change(spec: CallSpec) -> None:
        spec.kwargs[keyword] = size
        for name in names:
            shape = spec.views[name].shape
            spec.views[name].shape = (*shape[:d], size, *shape[d + 1 :])

    return change


@dataclass(frozen=True)
class Fault:
    name: str
    change: Change
    places: str = ""  # the tensor that it puts somewhere else
    in_place: bool = False  # only a fault of the in-place op


# In the order of the checks. Each can be added to any other, if the later one comes first.
ARGUMENT_FAULTS = [
    Fault("v rank", deeper("v")),
    Fault("positions rank", deeper("positions")),
    Fault("v_pool rank", deeper("v_pool")),
    Fault("q heads", longer("q", 1)),
    Fault("k heads", longer("k", 1)),
    Fault("v tokens", longer("v", 0)),
    Fault("positions length", longer("positions", 0)),
    Fault("k_pool heads", longer("k_pool", 1)),
    Fault("v_pool rows", longer("v_pool", 0)),
    Fault("k dtype", dtype(k="bfloat16")),
    Fault("v_pool dtype", dtype(v_pool="float16")),
    Fault("float dtype", float_dtypes("int64")),
    Fault("slots dtype", dtype(slots="int16")),
    Fault("odd head_dim", resized("head_dim", 2, 63, *FLOATS)),
    Fault("no query heads", resized("num_qo_heads", 1, 0, "q")),
    Fault("no kv heads", resized("num_kv_heads", 1, 0, "k", "v", "k_pool", "v_pool")),
    Fault("rope_base", keyword(rope_base=0.0)),
    Fault("slots on meta", on_meta("slots"), "slots"),
    Fault("q's storage", storage_bytes(q=0)),
]
# The later of two of these is added last, since it may put a tensor into one that was moved.
OVERLAP_FAULTS = [
    Fault("k_pool itself", strides(k_pool=(0, 64, 1))),
    Fault("v_pool itself", strides(v_pool=(0, 64, 1))),
    Fault("v_pool in k_pool", inside("v_pool", "k_pool"), "v_pool"),
    *(
        Fault(f"{guest} in {pool}", inside(guest, pool), guest)
        for pool in ("k_pool", "v_pool")
        for guest in ("q", "k", "v", "positions", "slots")
    ),
    Fault("q itself", strides(q=(0, 64, 1)), in_place=True),
    Fault("k itself", strides(k=(0, 64, 1)), in_place=True),
    Fault("k in q", inside("k", "q"), "k", in_place=True),
    *(
        Fault(f"{guest} in {host}", inside(guest, host), guest, in_place=True)
        for host in ("q", "k")
        for guest in ("v", "positions", "slots")
    ),
]
FAULTS = ARGUMENT_FAULTS + OVERLAP_FAULTS


def rule(error: tuple[str, str] | None) -> str:
    """What is broken, without the sizes."""
    assert error is not None and error[0] == "ValueError", error
    return re.split(r"got|\[\d", re.sub(r"\d+", "N", error[1]))[0]


@pytest.mark.parametrize("kernel", ["cpu kernel", "fake"])
@pytest.mark.parametrize("first", range(len(FAULTS)), ids=lambda i: FAULTS[i].name)
def test_the_earlier_of_two_faults_is_reported(first: int, kernel: str) -> None:
    earlier = FAULTS[first]
    call = PLAIN_WAYS[kernel]
    op = "rope_pool_fused_"
    expected = rule(error_of(lambda: call(op, broken_spec(earlier.change).build())))
    for later in FAULTS[first + 1 :]:
        if later.places and later.places == earlier.places:
            continue
        changes = (
            [earlier.change, later.change] if earlier in OVERLAP_FAULTS else [later.change, earlier.change]
        )
        spec = broken_spec(both(*changes))
        assert rule(error_of(lambda spec=spec: call(op, spec.build()))) == expected, later.name


def test_each_fault_breaks_another_rule() -> None:
    rules = [
        rule(error_of(lambda f=f: run_cpu_kernel("rope_pool_fused_", broken_spec(f.change).build())))
        for f in FAULTS
    ]
    assert len(set(rules)) == len(FAULTS)


# ---- Zero tokens, empty pools, shared memory without overlap

# Without tokens there is nothing that a storage could lack or that could overlap.
NEED_TOKENS = {"q's storage", "q itself", "k itself", "k in q"} | {
    f"{guest} in {host}"
    for host in ("k_pool", "v_pool", "q", "k")
    for guest in ("q", "k", "v", "positions", "slots")
}


@each_op
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_zero_tokens_run_every_check(fault: Fault, op: str) -> None:
    spec = make_spec(num_tokens=0)
    fault.change(spec)
    legal = fault.name in NEED_TOKENS
    for way in ("cpu kernel", "fake"):
        error = error_of(lambda way=way: PLAIN_WAYS[way](op, spec.build()))
        assert error is None if legal else error[0] == "ValueError", (way, error)


def pools_in(shape: tuple[int, ...], strides: tuple[int, ...], v_offset: int) -> Change:
    """Both pools as views of one buffer."""

    def change(spec: CallSpec) -> None:
        for name, offset in (("k_pool", 0), ("v_pool", v_offset)):
            spec.views[name] = replace(
                spec.views[name], shape=shape, strides=strides, buffer="pools", offset=offset
            )

    return change


def packed_qkv(spec: CallSpec) -> None:
    for name, offset in (("q", 0), ("k", 8 * 64), ("v", 10 * 64)):
        spec.views[name] = replace(spec.views[name], strides=(12 * 64, 64, 1), buffer="qkv", offset=offset)


def in_the_gaps_of_the_pool(spec: CallSpec) -> None:
    """Pool rows with a gap of 12 heads, where q, k and v lie, and one for an int64 position."""
    spec.views["positions"].dtype = torch.int64
    row = 16 * 64
    for name, offset in (("k_pool", 0), ("q", 2 * 64), ("k", 10 * 64), ("v", 12 * 64)):
        spec.views[name] = replace(spec.views[name], strides=(row, 64, 1), buffer="k_pool", offset=offset)
    spec.views["positions"] = replace(
        spec.views["positions"], strides=(row // 2,), buffer="k_pool", offset=14 * 32
    )


LEGAL: dict[str, Change] = {
    "zero tokens": sizes(num_tokens=0),
    "empty pools": sizes(pool_size=0),
    "zero tokens, empty pools": sizes(num_tokens=0, pool_size=0),
    "head_dim 2": sizes(head_dim=2),
    "k rows then v rows": pools_in((128, 2, 64), (256, 64, 1), 128),
    "k heads between v heads": pools_in((128, 2, 64), (256, 128, 1), 64),
    "k features between v features": pools_in((128, 2, 64), (256, 128, 2), 1),
    "heads before rows": pools_in((128, 2, 64), (64, 2 * 128 * 64, 1), 128 * 64),
    "a pool of one row, whose stride says nothing": pools_in((1, 2, 64), (0, 64, 1), 128),
    "packed qkv": packed_qkv,
    "all in the gaps of k_pool": in_the_gaps_of_the_pool,
    "positions between slots": both(
        strides(positions=(2,), slots=(2,)), inside("slots", "positions", offset=1)
    ),
    "v is k_pool's neighbour": inside("v", "k_pool", offset=128 * 128),
}


@each_op
@pytest.mark.parametrize("name", LEGAL)
def test_legal(name: str, op: str) -> None:
    spec = broken_spec(LEGAL[name])
    slot = -1 if spec.views["k_pool"].shape[0] == 0 else 0
    sample = spec.build(slot=slot)
    as_fake(sample).run(op)
    spec.build("meta").run(op)
    apart = sample.clone()
    for shared, own in zip(sample.run(op), apart.run(op), strict=True):
        assert torch.equal(shared, own)


# ---- Grad mode


class PassThrough(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def run_under_a_dispatch_mode(op: str, s: Sample) -> None:
    with PassThrough():
        s.run(op)


GRAD_WAYS = {
    **{way: PLAIN_WAYS[way] for way in ("cpu", "meta", "fake", "make_fx fake", "export")},
    "make_fx symbolic": lambda op, s: run_make_fx(op, s, "symbolic"),
}
# A kernel called from a dispatch mode runs below autograd.
GRAD_WAYS_BELOW_AUTOGRAD = {
    "make_fx real": PLAIN_WAYS["make_fx real"],
    "dispatch mode": run_under_a_dispatch_mode,
}
GRAD_TEXT = (
    "rope_pool_fused has no backward, but {name} requires grad: "
    "call it under torch.no_grad(), or detach {name}"
)


def with_grad(name: str) -> Sample:
    sample = make_sample()
    return sample.with_(**{name: getattr(sample, name).requires_grad_()})


@each_op
@pytest.mark.parametrize("way", GRAD_WAYS)
@pytest.mark.parametrize("name", FLOATS)
def test_requires_grad_is_refused(name: str, way: str, op: str) -> None:
    error = error_of(lambda: GRAD_WAYS[way](op, with_grad(name)))
    assert error == ("RuntimeError", GRAD_TEXT.format(name=name))


@each_op
@pytest.mark.parametrize("way", WRAPPING_WAYS)
@pytest.mark.parametrize("name", ["q", "v_pool"])
def test_requires_grad_text_is_inside_the_error_of_compile(name: str, way: str, op: str) -> None:
    error = error_of(lambda: WRAPPING_WAYS[way](op, with_grad(name)))
    assert error is not None and GRAD_TEXT.format(name=name) in error[1]


@each_op
@pytest.mark.parametrize("way", GRAD_WAYS_BELOW_AUTOGRAD)
def test_requires_grad_of_an_activation_is_refused_below_autograd(way: str, op: str) -> None:
    sample = with_grad("q")
    error = error_of(lambda: GRAD_WAYS_BELOW_AUTOGRAD[way](op, sample.with_(q=sample.q * 2)))
    assert error == ("RuntimeError", GRAD_TEXT.format(name="q"))


@each_op
@pytest.mark.parametrize("way", GRAD_WAYS_BELOW_AUTOGRAD)
def test_requires_grad_of_a_leaf_is_not_seen_below_autograd(way: str, op: str) -> None:
    """A limit of torch's C shim: when it can be asked, this fails, and the op should refuse."""
    assert error_of(lambda: GRAD_WAYS_BELOW_AUTOGRAD[way](op, with_grad("q"))) is None


@each_op
def test_requires_grad_of_a_non_leaf_is_refused(op: str) -> None:
    sample = with_grad("k")
    error = error_of(lambda: sample.with_(k=sample.k * 2).run(op))
    assert error == ("RuntimeError", GRAD_TEXT.format(name="k"))


@each_op
def test_requires_grad_is_checked_before_the_contract(op: str) -> None:
    for way in (lambda s: s, as_fake):
        sample = with_grad("q").with_(head_dim=3)
        error = error_of(lambda sample=sample, way=way: way(sample).run(op))
        assert error == ("RuntimeError", GRAD_TEXT.format(name="q"))


@each_op
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_requires_grad_is_ignored(mode: type, op: str) -> None:
    expected = make_sample().run(op)
    for name in FLOATS:
        with mode():
            for result, right in zip(with_grad(name).run(op), expected, strict=True):
                assert torch.equal(result, right)
