"""What a call must do, whatever its arguments: checked on results, errors and every byte of memory."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import emulated_mps
import metal_emulator
import torch
from checks import assert_rotated, pair_sums, rotated
from fuzz_case import Case, Placed, fill, replaced
from sample import OPS, TENSOR_NAMES, Sample
from torch import Tensor

from torch_ropepool import _fake, selftest

Outcome = tuple[str, str]  # an error's type and text; "accepted" and ""
ACCEPTED = "accepted", ""
# What torch itself raises, for arguments that never come to the op's kernels, beside the op's own.
ERRORS = (ValueError, IndexError, RuntimeError, NotImplementedError, TypeError)


def arguments(call: Sample) -> dict[str, Any]:
    return {**dict(zip(TENSOR_NAMES, call.args, strict=True)), **call.kwargs}


def attempt(function: Callable[[], Any]) -> tuple[Outcome, Any]:
    try:
        return ACCEPTED, function()
    except ERRORS as error:
        return (type(error).__name__, str(error)), None


def contract(call: Sample, op: str) -> Outcome:
    """What the contract for traced calls says of this one, and the values."""

    def check() -> None:
        described = _fake.Call(**arguments(call))
        _fake.require_no_grad(described)
        _fake.check_contract(described, in_place=op == "rope_pool_fused_")

    said, _ = attempt(check)
    if said != ACCEPTED:
        return said
    if call.slots.numel() > 2**40:
        return "RuntimeError", "rope_pool_fused could not allocate an output of q's size"
    inv_freq = call.kwargs.get("inv_freq")
    if inv_freq is not None and not inv_freq.isfinite().all():
        return "ValueError", "inv_freq"
    if call.slots.numel() and int(call.slots.max()) >= num_rows(call):
        return "IndexError", "slots["
    return ACCEPTED


def num_rows(call: Sample) -> int:
    return call.k_pool.shape[:-2].numel()


def assert_unchanged(placed: Placed, before: dict[str, Tensor]) -> None:
    for name, memory in placed.memory.items():
        assert torch.equal(memory, before[name]), f"the buffer of {name} was written"


def check(case: Case) -> str:
    """Raises AssertionError where a backend is wrong. Returns what the case was."""
    contents = fill(case)
    placed = Placed(case, contents)
    before = placed.image()
    if case.odd is not None:
        # torch reads a tensor that it makes another of: one that is whole, and fits into memory.
        views = case.spec.views.values()
        if any(
            v.storage_bytes is not None or v.device == "meta" or math.prod(v.shape) > 2**20 for v in views
        ):
            return "not made"
        try:
            placed.call = replaced(case, placed.call)
        except ERRORS:  # torch has no such tensor
            return "not made"
        if case.odd[1] != "subclass":
            return check_odd(case, placed, before)
    said = contract(placed.call, case.op)
    key = torch._C.DispatchKey
    on_cpu = {t.device.type for t in placed.call.tensors} == {"cpu"}

    def run() -> Any:
        if on_cpu:
            return OPS[case.op](**arguments(placed.call))
        return OPS[case.op].default._op_dk(key.CPU, **arguments(placed.call))

    got, results = attempt(run)
    assert_says(got, said)
    if got != ACCEPTED:
        assert_unchanged(placed, before)
    else:
        assert_right(case, contents, placed, results)
    check_mps(case, contents, said, turned(case, placed, results))
    if case.seed % 8 == 0:
        check_meta(case, said)
    return got[0]


def assert_says(got: Outcome, said: Outcome) -> None:
    """Errors that only values can tell are known by how they begin, the others by their whole text."""
    if said[1] in ("inv_freq", "slots[", "rope_pool_fused could not allocate an output of q's size"):
        assert got[0] == said[0] and got[1].startswith(said[1]), (got, said)
    else:
        assert got == said


def check_meta(case: Case, said: Outcome) -> None:
    if any(view.device != "cpu" for view in case.spec.views.values()):
        return
    call = case.spec.build("meta")
    got, results = attempt(lambda: OPS[case.op](**arguments(call)))
    if said[1] == "inv_freq" or said[0] in ("IndexError", "RuntimeError"):  # of values and memory
        said = ACCEPTED
    if said == ACCEPTED and call.slots.numel() > 2**40:  # torch has a limit even for tensors without data
        assert got == ACCEPTED or "overflow" in got[1], got
    else:
        assert got == said, (got, said)
    for result, x in zip(results or (), (call.q, call.k), strict=False):
        assert (result.shape, result.dtype, result.device) == (x.shape, x.dtype, x.device)
        assert result.is_contiguous()


# ---- Results


def assert_right(
    case: Case, contents: dict[str, Tensor], placed: Placed, results: Any, *, may_mix: bool = False
) -> None:
    """The results are those of the reference, and of all memory nothing else has changed.

    may_mix: rows whose slot several tokens name are left out, and slots beyond the pool are not stored.
    """
    want = Placed(case, contents)  # becomes the memory that is expected
    # Without strides so huge that torch cannot slice the tensor.
    original = want.call.map(lambda t: t.clone(memory_format=torch.contiguous_format))
    in_place = case.op == "rope_pool_fused_"
    q_rot, k_rot = (placed.call.q, placed.call.k) if in_place else results[:2]
    assert_turned(q_rot, original.q, original)
    assert_turned(k_rot, original.k, original)
    if in_place:
        assert results is None
        bits_of(want.call.q).copy_(bits_of(q_rot))
        bits_of(want.call.k).copy_(bits_of(k_rot))
    else:
        assert q_rot.is_contiguous() and k_rot.is_contiguous()
        if case.op == "rope_pool_fused" and case.odd is None:  # torch wraps what comes back for a subclass
            assert results[2] is placed.call.k_pool and results[3] is placed.call.v_pool
    slots = original.slots.tolist()
    repeated = {slot for slot, count in Counter(slots).items() if count > 1}
    page_size = original.kwargs.get("page_size")
    for token, slot in enumerate(slots):
        if slot < 0 or slot >= num_rows(original):
            assert slot < 0 or may_mix
            continue
        row = slot if page_size is None else divmod(slot, page_size)
        if may_mix and slot in repeated:
            for pools in (want.call, placed.call):
                bits_of(pools.k_pool)[row] = bits_of(pools.v_pool)[row] = 0
            continue
        bits_of(want.call.k_pool)[row] = bits_of(k_rot)[token]
        bits_of(want.call.v_pool)[row] = bits_of(original.v)[token]
    assert_unchanged(placed, want.image())


def bits_of(t: Tensor) -> Tensor:
    """The same memory as integers."""
    return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize])


def assert_turned(got: Tensor, x: Tensor, call: Sample) -> None:
    """As checks.assert_rotated, and right where an input or a sum is not finite."""
    assert (got.shape, got.dtype) == (x.shape, x.dtype)
    sums = pair_sums(x, call)  # |x1| + |x2|, at both places of the pair
    scaling = abs(call.kwargs.get("attention_scaling", 1.0))
    computed_in = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32)
    largest = torch.finfo(x.dtype).max
    # Where a product may overflow, or the sum that is rounded to the output.
    large = sums * max(scaling, 1.0) >= 0.4 * min(computed_in.max, largest)
    tame = ~(large | sums.isnan())
    zero = torch.zeros((), dtype=x.dtype)
    assert_rotated(got.where(tame, zero), x.where(tame, zero), call)
    if bool(tame.all()):
        return
    nan = sums.isnan()
    assert got[nan].isnan().all()
    infinite = sums.isinf() & has_infinity(x, call)
    assert not got[infinite].isfinite().any()
    # The rest are finite but large: about right, or infinite where the exact number is or nearly is.
    exact = rotated(x, call)
    rest = large & ~nan & ~infinite
    near = (got.double() - exact).abs() <= 0.01 * scaling * sums.clamp(max=torch.finfo(torch.float64).max)
    product_overflows = sums * scaling >= 0.4 * computed_in.max if scaling > 1 else torch.tensor(False)
    beyond = ~got.isfinite() & ((exact.abs() >= 0.99 * largest) | product_overflows)
    # In float64 the reference overflows too, where the kernel's fma may not.
    unknown = product_overflows & ~exact.isfinite()
    assert (near | beyond | unknown)[rest].all()


def has_infinity(x: Tensor, call: Sample) -> Tensor:
    """At both places of a pair in which there is one."""
    return pair_sums(x.isinf().double(), call) > 0


# ---- Metal, emulated


def turned(case: Case, placed: Placed, results: Any) -> tuple[Tensor, ...]:
    """q_rot and k_rot of an accepted call."""
    return (placed.call.q, placed.call.k) if case.op == "rope_pool_fused_" else (results or ())[:2]


def check_mps(case: Case, contents: dict[str, Tensor], said: Outcome, on_cpu: tuple[Tensor, ...]) -> None:
    views = case.spec.views.values()
    if any(view.dtype == torch.float64 or view.device != "cpu" for view in views):
        return  # float64 is refused there
    if said != ACCEPTED and case.seed % 4:
        return
    placed = Placed(case, contents)
    before = placed.image()
    said = said[0], said[1].replace("float32 or float64, got", "float32, got")
    emulated_mps.load()
    with metal_emulator.recording(case.seed, raises=False) as run:
        got, results = attempt(lambda: emulated_mps.call_kernel(case.op, arguments(placed.call)))
    # Neither is looked at there: such tokens are not stored, such angles are no numbers.
    wild_angles = said[1] == "inv_freq"
    if wild_angles or said[1] == "slots[":
        assert got == ACCEPTED, got
    else:
        assert_says(got, said)
    if got != ACCEPTED:
        assert not run.faults, run.faults
        assert_unchanged(placed, before)
        return
    repeats = not emulated_mps.slots_are_distinct(arguments(placed.call))
    assert all(repeats and ("race: stores" in f or f.startswith("and")) for f in run.faults), run.faults
    if wild_angles:
        return
    assert_right(case, contents, placed, results, may_mix=True)
    if said == ACCEPTED:
        for g, w in zip(turned(case, placed, results), on_cpu, strict=True):
            assert selftest.same_bits(g, w)


# ---- Odd arguments


def check_odd(case: Case, placed: Placed, before: dict[str, Tensor]) -> str:
    """Refused, in words that name an argument. The primitive may leave that to torch."""
    got, _ = attempt(lambda: OPS[case.op](**arguments(placed.call)))
    assert got != ACCEPTED
    left_to_torch = got[0] == "NotImplementedError" and case.op == "_rope_pool_fused"
    names = (*TENSOR_NAMES, *placed.call.kwargs)
    assert left_to_torch or any(re.search(rf"\b{name}\b", got[1]) for name in names), got
    assert_unchanged(placed, before)
    return f"odd, {got[0]}"
