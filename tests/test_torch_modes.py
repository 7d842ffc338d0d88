"""What torch can be told to do behind a call's back: autocast, default devices, determinism, subclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from checks import assert_same_bits, threads
from sample import OPS, TENSOR_NAMES, Sample, make_sample
from torch.utils._pytree import tree_map_only

import torch_ropepool

HALVES = (torch.float16, torch.bfloat16)
each_op = pytest.mark.parametrize("op", OPS)


class Module(torch.nn.Module):
    """One call of an op. The tensors are the module's arguments."""

    def __init__(self, op: str, call: Sample) -> None:
        super().__init__()
        self.op, self.kwargs = OPS[op], call.kwargs

    def forward(self, *args):
        return self.op(*args, **self.kwargs)


def compiled(op: str, call: Sample) -> None:
    torch._dynamo.reset()
    torch.compile(Module(op, call), fullgraph=True, backend="aot_eager")(*call.args)


def exported(op: str, call: Sample) -> None:
    torch.export.export(Module(op, call), call.clone().args).module()(*call.args)


WAYS: dict[str, Callable[[str, Sample], object]] = {
    "eager": lambda op, call: call.run(op),
    "compile": compiled,
    "export": exported,
}
each_way = pytest.mark.parametrize("way", WAYS)


def assert_same_call(got: Sample, want: Sample) -> None:
    """All that a call may write, q and k in place too."""
    for g, w in zip(got.args, want.args, strict=True):
        assert_same_bits(g, w)


# ---- Autocast casts nothing: the op has the dtype that it is given


@each_op
@each_way
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@torch.no_grad()
def test_autocast_changes_nothing(dtype, way, op):
    call = make_sample(dtype=dtype)
    plain = call.clone()
    WAYS[way](op, plain)
    for autocast_dtype in HALVES:
        under = call.clone()
        with torch.autocast("cpu", dtype=autocast_dtype):
            WAYS[way](op, under)
        assert_same_call(under, plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_outputs_under_autocast_have_qs_dtype(dtype):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q_rot, k_rot, *_ = make_sample(dtype=dtype).run()
    assert (q_rot.dtype, k_rot.dtype) == (dtype, dtype)


def test_a_projection_that_autocast_made_bfloat16_needs_pools_of_that_dtype():
    call = make_sample()
    before = call.clone()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        halves = [torch.nn.Linear(64, 64)(t) for t in (call.q, call.k, call.v)]
        with pytest.raises(
            ValueError, match=r"^pool dtypes must match q/k/v dtype, got k_pool float32, .* bf"
        ):
            call.with_(**dict(zip("qkv", halves, strict=True))).run()
    assert_same_call(call, before)


# ---- Defaults are for tensors that are made from nothing; the op's are made like q and k


@contextmanager
def defaults(device: str | None, dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@each_op
@each_way
@torch.no_grad()
def test_default_device_and_dtype_change_nothing(way, op):
    call = make_sample().with_(rope_base=12345.0)  # whose table is made under the defaults
    under = call.clone()
    with defaults("meta", torch.float64):
        WAYS[way](op, under)
    plain = call.clone()
    WAYS[way](op, plain)
    assert_same_call(under, plain)


def test_outputs_are_where_q_is_whatever_the_default_device():
    with defaults("meta", torch.float64):
        assert {t.device.type for t in make_sample().run()} == {"meta"}
    on_cpu = make_sample()
    with defaults("meta", torch.float64):
        q_rot, k_rot, *_ = on_cpu.run()
    assert {(t.device.type, t.dtype) for t in (q_rot, k_rot)} == {("cpu", torch.float32)}


def test_a_pool_follows_the_default_device_and_not_the_default_dtype():
    with defaults("meta", torch.float64):
        pool = torch_ropepool.KVPool(1, 4, 1, 8)
    assert (pool.device.type, pool.dtype) == ("meta", torch.float32)


# ---- Deterministic algorithms: on the CPU they change nothing, since the later token's row stays anyway


@each_op
@each_way
@pytest.mark.parametrize("fill", [True, False])
@torch.no_grad()
def test_deterministic_algorithms_change_nothing_on_the_cpu(fill, way, op, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill)
    slots = torch.tensor([3, 3, 9, -1, 9, 9, 0])
    call = make_sample().with_(slots=slots)
    plain = call.clone()
    WAYS[way](op, plain)
    torch.use_deterministic_algorithms(True)
    try:
        WAYS[way](op, call)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_call(call, plain)


# ---- A batch may be cut anywhere


@each_op
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64], ids=str)
def test_same_bits_however_a_batch_is_cut(dtype, op):
    num_tokens = 600
    call = make_sample(num_tokens, pool_size=num_tokens, dtype=dtype)
    whole = call.clone()
    with threads(2):
        q_rot, k_rot, *_ = whole.run(op)
    for sizes in ([1] * num_tokens, [599, 1], [1, 7, 64, 200, 0, 328]):
        cut = call.clone()
        parts = zip(*(getattr(cut, name).split(sizes) for name in TENSOR_NAMES[:5]), strict=True)
        rows = [cut.with_(**dict(zip(TENSOR_NAMES, part, strict=False))).run(op)[:2] for part in parts]
        for got, want in zip(map(torch.cat, zip(*rows, strict=True)), (q_rot, k_rot), strict=True):
            assert_same_bits(got, want)
        assert_same_bits(cut.k_pool, whole.k_pool)
        assert_same_bits(cut.v_pool, whole.v_pool)


# ---- What the values of a call do, they do in a graph as well


def with_value(name: str, value: float) -> Callable[[Sample], Sample]:
    def change(call: Sample) -> Sample:
        getattr(call, name)[2] = value
        return call

    return change


VALUES: dict[str, Callable[[Sample], Sample]] = {
    "negative slot": with_value("slots", -1),
    "slot twice": lambda call: call.with_(slots=torch.tensor([3, 3, 9, -1, 9, 9, 0])),
    "position beyond int32": with_value("positions", 2**62),
    "negative position": with_value("positions", -(2**62)),
    "NaN in q": with_value("q", float("nan")),
    "infinite k": with_value("k", float("inf")),
    "NaN in v": with_value("v", float("nan")),
}


@each_op
@pytest.mark.parametrize("way", ["compile", "export"])
@pytest.mark.parametrize("name", VALUES)
@torch.no_grad()
def test_values_do_in_a_graph_what_they_do_in_eager(name, way, op):
    call = VALUES[name](make_sample(index_dtype=torch.int64))
    plain = call.clone()
    WAYS["eager"](op, plain)
    WAYS[way](op, call)
    assert_same_call(call, plain)


@each_op
@torch.no_grad()
def test_a_slot_out_of_range_in_an_exported_program_writes_nothing(op):
    call = make_sample()
    module = torch.export.export(Module(op, call), call.clone().args).module()
    call.slots[2] = 32
    before = call.clone()
    with pytest.raises(IndexError, match=r"^slots\[2\] is 32, out of range for pool_size 32"):
        module(*call.args)
    assert_same_call(call, before)


# ---- Subclasses are tensors


class Named(torch.Tensor):
    """A subclass that adds nothing."""


class Wrapped(torch.Tensor):
    """A tensor that holds another one, as DTensor does."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> torch.Tensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*tree_map_only(Wrapped, lambda t: t.inner, args), **(kwargs or {}))


SUBCLASSES = {
    "plain": lambda t: t.as_subclass(Named),
    "wrapper": Wrapped,
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
}


@each_op
@pytest.mark.parametrize("kind", SUBCLASSES)
@pytest.mark.parametrize("name", TENSOR_NAMES)
def test_a_subclass_is_a_tensor(name, kind, op):
    call, plain = make_sample(), make_sample()
    want = plain.run(op)
    got = call.with_(**{name: SUBCLASSES[kind](getattr(call, name))}).run(op)
    for g, w in zip(got[:2], want[:2], strict=True):
        assert_same_bits(g.inner if isinstance(g, Wrapped) else g.as_subclass(torch.Tensor), w)
    assert_same_call(call, plain)


@each_op
@torch.no_grad()
def test_a_graph_with_a_subclass_is_torchs_error_and_writes_nothing(op):
    """In torch 2.13 no custom op takes one in a compiled graph, in its kernel's place."""
    call = make_sample()
    before = call.clone()
    with pytest.raises(TypeError):
        compiled(op, call.with_(k_pool=call.k_pool.as_subclass(Named)))
    assert_same_call(call, before)


# ---- A device without kernels


@pytest.mark.parametrize("op", ["rope_pool_fused", "rope_pool_fused_"])
def test_a_device_without_kernels_is_named(op):
    """Tensors that torch takes to be another device's."""
    call = make_sample()
    before = call.clone()
    with (
        torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.XPU),
        pytest.raises(
            NotImplementedError, match=r"^torch_ropepool has no kernel here for tensors on cpu: `py"
        ),
    ):
        call.run(op)
    assert_same_call(call, before)
