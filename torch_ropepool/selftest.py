"""What `python -m torch_ropepool` runs: every kind of call on a device, bit against bit with the CPU's."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import reference

TENSORS = ("q", "k", "v", "positions", "slots", "k_pool", "v_pool", "inv_freq")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_INT32 = 2**31 - 1
SUBNORMALS = "subnormals, which Metal may flush"


@dataclass
class Case:
    """One call, its tensors on the CPU."""

    kind: str  # a row of the report
    name: str
    args: dict[str, Any]  # by argument name; tensors may be views
    has_subnormals: bool = False  # which Metal may flush


@dataclass
class Placed:
    """A case's call on a device, on memory of its own."""

    args: dict[str, Any]
    storages: dict[str, Tensor]  # every storage whole, by the arguments that are views of it


def place(case: Case, device: str) -> Placed:
    """Storages are copied whole, so that views stay views."""
    names: dict[int, list[str]] = {}
    whole: dict[int, Tensor] = {}
    args = dict(case.args)
    for name, t in case.args.items():
        if not isinstance(t, Tensor):
            continue
        key = t.untyped_storage()._cdata
        if key not in whole:
            on_cpu = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
            whole[key] = on_cpu.to(device, copy=True)
        names.setdefault(key, []).append(name)
        args[name] = whole[key].as_strided(t.shape, t.stride(), t.storage_offset())
    return Placed(args, {" ".join(names[key]): t for key, t in whole.items()})


def make_case(
    kind: str,
    name: str = "",
    *,
    num_tokens: int = 5,
    num_qo_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    pool_size: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype = torch.int32,
    **changes: Any,
) -> Case:
    """A call on normal numbers with distinct slots in random order; `changes` replaces arguments."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        count = math.prod(shape)
        padded = torch.randn(-(-count // 8) * 8, generator=generator).to(dtype)  # whole words of any dtype
        return padded[:count].view(shape)

    def indices(values: Tensor) -> Tensor:
        return values.to(index_dtype)

    args: dict[str, Any] = {
        "q": normal(num_tokens, num_qo_heads, head_dim),
        "k": normal(num_tokens, num_kv_heads, head_dim),
        "v": normal(num_tokens, num_kv_heads, head_dim),
        "positions": indices(torch.randint(4096, (num_tokens,), generator=generator)),
        "slots": indices(torch.randperm(max(pool_size, num_tokens), generator=generator)[:num_tokens]),
        "k_pool": normal(pool_size, num_kv_heads, head_dim),
        "v_pool": normal(pool_size, num_kv_heads, head_dim),
        "head_dim": head_dim,
        "num_qo_heads": num_qo_heads,
        "num_kv_heads": num_kv_heads,
        "rope_base": 10000.0,
    }
    if "inv_freq" in changes:
        del args["rope_base"]
    return Case(kind, name, {**args, **changes})


def relaid(t: Tensor, order: tuple[int, ...] = (), *, offset: int = 0, gap: int = 0) -> Tensor:
    """The values in a buffer of their own: dimensions in another order, an offset, gaps between rows."""
    order = order or tuple(range(t.dim()))
    strides = [0] * t.dim()
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * t.shape[dim] + gap
    size = -(-(offset + step) // 8) * 8
    buffer = torch.full((size,), 7, dtype=t.dtype)
    return buffer.as_strided(t.shape, strides, offset).copy_(t)


def packed(case: Case, dim: int) -> Case:
    """q, k and v as slices of one tensor, along the tokens or the heads."""
    tensors = [case.args[name] for name in ("q", "k", "v")]
    parts = torch.cat(tensors, dim=dim).split([t.shape[dim] for t in tensors], dim=dim)
    return replace(case, args={**case.args, **dict(zip(("q", "k", "v"), parts, strict=True))})


def layer_pools(pool_size: int, heads: int, head_dim: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The pools of layer 1 of three, views of one buffer."""
    generator = torch.Generator().manual_seed(1)
    buffer = torch.randn(3, 2, pool_size, heads, head_dim, generator=generator).to(dtype)
    return {"k_pool": buffer[1, 0], "v_pool": buffer[1, 1]}


def cases() -> Iterator[Case]:
    """Every kind of call, one thing varied at a time."""
    for dtype in DTYPES:
        yield make_case("dtypes", f"{dtype}", dtype=dtype)
        yield make_case("dtypes", f"{dtype}, int64 indices", dtype=dtype, index_dtype=torch.int64)
    for num_tokens in (0, 1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 1000):
        yield make_case("token counts", f"{num_tokens} tokens", num_tokens=num_tokens, pool_size=1024)
    yield make_case(
        "token counts", "an empty pool", pool_size=0, slots=torch.full((5,), -1, dtype=torch.int32)
    )
    for dtype in DTYPES:
        for head_dim in (2, 4, 8, 16, 64, 72, 80, 96, 128, 256, 514):
            name = f"head_dim {head_dim}, {dtype}"
            yield make_case("head sizes", name, head_dim=head_dim, dtype=dtype)
    for heads in ((1, 1), (1, 4), (9, 3), (32, 8), (40, 8), (7, 1)):
        name = f"{heads[0]} heads of q, {heads[1]} of k"
        yield make_case("head sizes", name, num_qo_heads=heads[0], num_kv_heads=heads[1])
    for dtype in DTYPES:
        yield from layout_cases(dtype)
    yield from position_cases()
    yield from slot_cases()
    yield from variant_cases()
    yield from value_cases()
    for dtype in DTYPES:
        yield from many_token_cases(dtype)


def layout_cases(dtype: torch.dtype) -> Iterator[Case]:
    base = make_case("strides and offsets", dtype=dtype)
    tensors = {name: base.args[name] for name in ("q", "k", "v", "k_pool", "v_pool")}

    def changed(name: str, **changes: Tensor) -> Case:
        return replace(base, name=f"{name}, {dtype}", args={**base.args, **changes})

    equal_heads = make_case(base.kind, num_qo_heads=2, dtype=dtype)
    yield replace(packed(equal_heads, 0), name=f"qkv packed along tokens, {dtype}")
    yield replace(packed(base, 1), name=f"qkv packed along heads, {dtype}")
    for name, t in tensors.items():
        yield changed(f"{name} at an odd offset", **{name: relaid(t, offset=1)})
        yield changed(f"{name} at an even offset", **{name: relaid(t, offset=8)})
        yield changed(f"{name} with features apart", **{name: relaid(t, (2, 1, 0))})
        yield changed(f"{name} heads first", **{name: relaid(t, (1, 0, 2))})
        yield changed(f"{name} rows with odd gaps", **{name: relaid(t, gap=3)})
    yield changed("v expanded", v=tensors["v"][:1, :1].expand(5, 2, -1))
    yield changed("pools of one layer of many", **layer_pools(32, 2, 64, dtype))
    indices = torch.arange(100, 140, dtype=torch.int32)
    yield changed("indices with strides", positions=indices[1::3][:5], slots=(indices - 90)[2::4][:5])
    yield changed("one position for all", positions=indices[3:4].expand(5))


def position_cases() -> Iterator[Case]:
    edges = [0, 1, -1, 131071, 2**24 + 1, MAX_INT32, -(2**31)]
    for dtype in DTYPES:
        positions = torch.tensor(edges, dtype=torch.int32)
        yield make_case("positions", f"int32 edges, {dtype}", num_tokens=7, positions=positions, dtype=dtype)
        far = torch.tensor([2**31, -(2**31) - 1, 2**40 + 3, 2**63 - 1, -(2**63), 5, -5])
        yield make_case("positions", f"int64 edges, {dtype}", num_tokens=7, positions=far, dtype=dtype)
    for base in (500000.0, 1.0, 0.5, 1e30):
        yield make_case("positions", f"rope_base {base:g}", rope_base=base, head_dim=128)


def slot_cases() -> Iterator[Case]:
    for slots in ([-1, 3, -(2**31), 0, 31], [-1] * 5, [31, 30, 29, 28, 27]):
        yield make_case("slots", f"slots {slots}", slots=torch.tensor(slots, dtype=torch.int32))
    yield make_case("slots", "int64 slots", slots=torch.tensor([-(2**63), 1, 31, -1, 0]))


def variant_cases() -> Iterator[Case]:
    for dtype in DTYPES:

        def case(name: str, dtype: torch.dtype = dtype, **changes: Any) -> Case:
            return make_case("variants of RoPE", f"{name}, {dtype}", dtype=dtype, **changes)

        yield case("interleaved", interleaved=True)
        yield case("interleaved, head_dim 72", interleaved=True, head_dim=72)
        yield case("rotary_dim 32 of 64", rotary_dim=32)
        yield case("rotary_dim 32 of 80", rotary_dim=32, head_dim=80)
        yield case("rotary_dim 20 of 64", rotary_dim=20)
        yield case("rotary_dim 2 of 7", rotary_dim=2, head_dim=7)
        yield case("interleaved rotary_dim 32 of 96", rotary_dim=32, head_dim=96, interleaved=True)
        yield case("attention_scaling", attention_scaling=1.3465735902799727)
        yield case("inv_freq", inv_freq=torch.logspace(0, -5, 32))
        edges = [1.0, -0.25, 0.0, 1e-38, 1e-45, 3e38, 1e10, 0.1]
        yield case("inv_freq with odd values", head_dim=16, inv_freq=torch.tensor(edges))
        yield case("inv_freq with a stride", inv_freq=torch.logspace(0, -5, 96)[::3])
        sections = ([8, 12, 12], [0, 0, 32], [11, 11, 10])
        for section in sections:
            for turns in (False, True):
                positions = torch.arange(15, dtype=torch.int32).view(3, 5) * 777
                yield case(
                    f"mrope {section}{' interleaved' * turns}",
                    positions=positions,
                    mrope_section=section,
                    mrope_interleaved=turns,
                )
        for page_size in (1, 4, 3):
            pools = make_case("", pool_size=12, dtype=dtype).args
            paged = {name: pools[name].view(-1, page_size, 2, 64) for name in ("k_pool", "v_pool")}
            slots = torch.tensor([11, 0, 5, -1, 7], dtype=torch.int32)
            yield case(f"pages of {page_size}", page_size=page_size, slots=slots, **paged)
        heads_first = {name: relaid(paged[name], (0, 2, 1, 3)) for name in paged}
        yield case("pages with heads first", dtype, page_size=page_size, slots=slots, **heads_first)


def value_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        info = torch.finfo(dtype)
        word = {2: torch.int16, 4: torch.int32}[info.bits // 8]
        generator = torch.Generator().manual_seed(2)
        any_bits = torch.randint(-(2**15), 2**15, (5 * 2 * 64,), generator=generator)
        if info.bits == 32:
            any_bits = any_bits * 65536 + any_bits.flip(0).abs()
        v = any_bits.to(word).view(dtype).view(5, 2, 64)
        yield make_case("values", f"v of any bits, {dtype}", v=v, dtype=dtype)
        special = torch.tensor([0.0, -0.0, info.max, info.min, info.eps, 1.0, torch.inf, -torch.inf])
        q = special.to(dtype).repeat(5 * 4 * 8).view(5, 4, 64)
        yield make_case("values", f"infinities and large numbers, {dtype}", q=q, dtype=dtype)
        small = torch.full((5, 4, 64), info.smallest_normal / 8).to(dtype)
        yield replace(make_case("values", f"subnormals, {dtype}", q=small, dtype=dtype), has_subnormals=True)


def many_token_cases(dtype: torch.dtype) -> Iterator[Case]:
    """A GPU has one form of the kernel for these, and one for few tokens, which most cases have."""
    count = 1000

    def case(name: str, **changes: Any) -> Case:
        heads = {"num_qo_heads": 3, "num_kv_heads": 1, "head_dim": 64, "pool_size": count} | changes
        return make_case("many tokens", f"{name}, {dtype}", num_tokens=count, dtype=dtype, **heads)

    base = case("one after the other")
    yield base
    yield case("rotary_dim 32 of 64", rotary_dim=32)
    yield case("as many heads of k as of q", num_qo_heads=9, num_kv_heads=9, head_dim=16)
    yield replace(packed(base, 1), name=f"qkv packed along heads, {dtype}")
    far = torch.arange(count) * 9223372036854775 * torch.tensor([1, -1]).repeat(count // 2)
    slots = (torch.arange(2 * count) - count)[::2]
    yield case("int64 indices with strides", positions=far.repeat_interleave(3)[::3], slots=slots)
    narrow = (torch.arange(2 * count, dtype=torch.int32) - count)[::2]
    near = torch.arange(-count, 2 * count, 3, dtype=torch.int32)
    yield case("int32 indices with strides", positions=near.repeat_interleave(2)[::2], slots=narrow)


# ---- Running them

Call = Callable[[str, dict[str, Any]], Any]  # an op's name and its arguments -> what it returns
OPS = ("rope_pool_fused", "_rope_pool_fused", "rope_pool_fused_")


def call_op(op: str, args: dict[str, Any]) -> Any:
    return getattr(torch.ops.ropepool, op)(**args)


def results(case: Case, op: str, device: str, call: Call = call_op) -> dict[str, Tensor]:
    """What a call returned and left in every byte that its arguments are views of, on the CPU."""
    placed = place(case, device)
    returned = call(op, placed.args)
    after = dict(placed.storages)
    if op != "rope_pool_fused_":
        after["q_rot"], after["k_rot"] = returned[:2]
    return {name: t.cpu() for name, t in after.items()}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are the same. A NaN that was computed may be any NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    word = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    same = a.contiguous().view(word) == b.contiguous().view(word)
    if a.is_floating_point():
        same |= a.isnan() & b.isnan()
    return bool(same.all())


def difference(case: Case, op: str, device: str, call: Call = call_op) -> str | None:
    """What differs from the CPU kernel's result, or None."""
    want = results(case, op, "cpu")
    got = results(case, op, device, call)
    wrong = [name for name in want if not same_bits(got[name], want[name])]
    return f"{op}, {case.kind}, {case.name}: {', '.join(wrong)} not as on the CPU" if wrong else None


def inaccuracy(case: Case, device: str, call: Call = call_op) -> str | None:
    """How q_rot or k_rot is further from exact arithmetic than is promised, or None."""
    q_rot, k_rot = call("_rope_pool_fused", place(case, device).args)
    exact: dict[str, Any] = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in place(case, "cpu").args.items()
    }
    exact["k_pool"], exact["v_pool"] = exact["k_pool"].clone(), exact["v_pool"].clone()
    want = reference.rope_pool_fused(**exact)
    scaling = abs(case.args.get("attention_scaling", 1.0))
    for name, got, exactly in (("q_rot", q_rot, want[0]), ("k_rot", k_rot, want[1])):
        # sin and cos 9e-8, two roundings of float32: 4e-7 of |x1| + |x2|, which is at most twice the
        # largest; then the rounding to the dtype.
        x = exact[name[0]]
        info = torch.finfo(got.dtype)
        tolerance = 8e-7 * scaling * x.abs().amax(dim=-1, keepdim=True) + info.smallest_normal * info.eps
        if got.dtype != torch.float32:
            tolerance = tolerance + exactly.abs() * info.eps / 2
        worst = ((got.cpu().double() - exactly).abs() / tolerance).nan_to_num().max()
        if worst > 1:
            return f"{case.kind}, {case.name}: {name} is {float(worst):.3g} times the allowed error off"
    return None


def out_of_range(device: str, call: Call = call_op, *, raises: bool = False) -> str | None:
    """A slot beyond the pools is an IndexError, or it is not stored, and nothing else changes."""
    for far in (MAX_INT32, 2**63 - 1, 2**32 + 1):
        index_dtype = torch.int32 if far == MAX_INT32 else torch.int64
        good = torch.tensor([4, -1, 31, 0, -1], dtype=index_dtype)
        bad = torch.tensor([4, 32, 31, 0, far], dtype=index_dtype)
        if raises:
            try:
                results(make_case("slots", slots=bad), "rope_pool_fused", device, call)
            except IndexError:
                continue
            return "no IndexError for a slot out of range"
        want = results(make_case("slots", slots=good), "rope_pool_fused", "cpu")
        got = results(make_case("slots", slots=bad), "rope_pool_fused", device, call)
        for name in ("q_rot", "k_rot", "k_pool", "v_pool"):
            if not same_bits(got[name], want[name]):
                return f"{name} is wrong where a slot is out of range"
    return None


def repeated_slots(device: str, call: Call = call_op) -> str | None:
    """The last token of a slot is the one that stays, where deterministic algorithms are asked for."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.randint(-2, 20, (80,), generator=generator, dtype=torch.int32)
    before, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    try:
        for each in (slots, slots.long().repeat_interleave(2)[::2], torch.full((80,), 7)):
            case = make_case("slots", num_tokens=80, pool_size=20, slots=each)
            for op in OPS:
                fault = difference(case, op, device, call)
                if fault is not None:
                    return fault
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
    return None


def broken_calls() -> Iterator[Case]:
    """Calls that must be refused, with the same text everywhere."""
    good = make_case("contract")
    tensors = good.args
    for name, changes in {
        "packed q": {"q": tensors["q"].flatten(1)},
        "too few heads": {"q": tensors["q"][:, :3]},
        "positions of another length": {"positions": tensors["positions"][:4]},
        "k of another dtype": {"k": tensors["k"].float()},
        "pools of another dtype": {"k_pool": tensors["k_pool"].float(), "v_pool": tensors["v_pool"].float()},
        "float positions": {"positions": tensors["positions"].float()},
        "one pool for both": {"v_pool": tensors["k_pool"]},
        "pools that overlap": {"k_pool": tensors["k_pool"][:20], "v_pool": tensors["k_pool"][10:30]},
        "v from the pool": {"v": tensors["v_pool"][3:8]},
        "no base": {"rope_base": None},
        "a base of 0": {"rope_base": 0.0},
        "rotary_dim 65": {"rotary_dim": 65},
        "page_size without pages": {"page_size": 4},
        "mrope without rows": {"mrope_section": [8, 12, 12]},
    }.items():
        yield replace(good, name=name, args={**tensors, **changes})


def refusal(case: Case, device: str, call: Call = call_op) -> str | None:
    """How a device's refusal of a broken call differs from the CPU's, or None."""
    texts = []
    for on, made_by in (("cpu", call_op), (device, call)):
        placed = place(case, on)
        before = {name: t.clone() for name, t in placed.storages.items()}
        try:
            made_by("rope_pool_fused", placed.args)
            texts.append("accepted")
        except ValueError as error:
            texts.append(str(error))
        if not all(same_bits(t.cpu(), before[name].cpu()) for name, t in placed.storages.items()):
            return f"{case.name}: refused after a write on {on}"
    if texts[0] == "accepted" or texts[0] != texts[1]:
        return f"{case.name}: {texts[1]!r}, on the CPU {texts[0]!r}"
    return None


@dataclass
class Row:
    """One kind of check: how many were made and what went wrong."""

    kind: str
    count: int
    failures: list[str]

    @property
    def is_allowed_to_fail(self) -> bool:
        return self.kind == SUBNORMALS


def check_device(device: str, call: Call = call_op, *, is_cpu: bool | None = None) -> list[Row]:
    """All checks on a device. `call` is how an op is called there; is_cpu: whether by the CPU's kernel."""
    is_cpu = device == "cpu" if is_cpu is None else is_cpu
    rows: dict[str, Row] = {}

    def add(kind: str, failure: str | None) -> None:
        row = rows.setdefault(kind, Row(kind, 0, []))
        row.count += 1
        if failure is not None:
            row.failures.append(failure)

    def attempt(kind: str, check: Callable[..., str | None], *arguments: Any) -> None:
        try:
            add(kind, check(*arguments))
        except Exception as error:  # a report goes on
            name = arguments[0].name if isinstance(arguments[0], Case) else ""
            add(kind, f"{name}: {type(error).__name__}: {error}")

    for case in broken_calls():
        attempt("contract", refusal, case, device, call)
    for case in cases():
        if not case.has_subnormals and case.kind != "values" and len(case.args["q"]) > 0:
            attempt("accuracy against float64", inaccuracy, case, device, call)
        if is_cpu:
            continue
        kind = SUBNORMALS if case.has_subnormals else f"bits as on the CPU: {case.kind}"
        for op in OPS:
            attempt(kind, difference, case, op, device, call)
    attempt("slots out of range", partial(out_of_range, raises=is_cpu), device, call)
    attempt("repeated slots, deterministic algorithms", repeated_slots, device, call)
    return list(rows.values())


# ---- Timing


def eager(args: dict[str, Any], cos: Tensor, sin: Tensor) -> None:
    """The same work as models do it: cached cosines and sines, a half-split rotation, index_copy_."""

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    turn(args["q"])
    args["k_pool"].index_copy_(0, args["slots"], turn(args["k"]))
    args["v_pool"].index_copy_(0, args["slots"], args["v"])


def synchronize(device: str) -> None:
    if device != "cpu":
        getattr(torch, torch.device(device).type).synchronize()


def seconds_per_call(device: str, call: Callable[[], object], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - begin) / count


@torch.no_grad()
def timings(device: str) -> list[tuple[int, float, float]]:
    """Number of tokens, seconds of an op's call and of eager torch's; Llama-3-8B's shape, bfloat16."""
    rows = []
    for num_tokens in (1, 64, 1024):
        case = make_case(
            "timing",
            num_tokens=num_tokens,
            num_qo_heads=32,
            num_kv_heads=8,
            head_dim=128,
            pool_size=8192,
            index_dtype=torch.int64,  # index_copy_ takes no other
        )
        args = place(case, device).args
        cos, sin = (
            torch.cat((x, x), dim=-1)[:, None].to(device, torch.bfloat16)
            for x in reference.cos_sin(case.args["positions"], 128, rope_base=10000.0)
        )
        count = 50 if num_tokens == 1 else 10
        calls = (partial(call_op, "rope_pool_fused", args), partial(eager, args, cos, sin))
        rounds = [[seconds_per_call(device, call, count) for call in calls] for _ in range(12)][2:]
        ours, theirs = (statistics.median(times) for times in zip(*rounds, strict=True))
        rows.append((num_tokens, ours, theirs))
    return rows
