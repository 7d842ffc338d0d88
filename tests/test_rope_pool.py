"""The three ops on the CPU against the reference in float64: values, pools, layouts, threads, errors."""

from __future__ import annotations

import hashlib
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import expecttest
import pytest
import torch
from checks import HALF_DTYPES, assert_same_bits, check, rotated, threads
from sample import OPS, Sample, around, bits, make_sample, place, round_once
from torch import Tensor

import torch_ropepool

IN_PLACE = "rope_pool_fused_"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)
HEADS = ((1, 1), (9, 3), (32, 8), (1, 4))
# Below, at and above a vector's width; 258 and 600 need more than one tile of angles (128 pairs).
HEAD_DIMS = (2, 4, 64, 72, 80, 96, 128, 254, 256, 258, 600)
NUM_TOKENS = (0, 1, 2, 7, 8, 9, 127, 128, 129, 300)
# Tokens enough that two threads share them: 150 each. A thread's share starts at 28 default tokens.
MANY = 300

every_op = pytest.mark.parametrize("op", OPS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# ---- Values, one factor at a time


@every_op
@every_dtype
def test_dtypes(op, dtype):
    check(make_sample(dtype=dtype), op)


@every_op
@pytest.mark.parametrize("positions_dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("slots_dtype", INDEX_DTYPES, ids=str)
def test_index_dtypes(op, positions_dtype, slots_dtype):
    call = make_sample(MANY, pool_size=MANY)
    check(call.with_(positions=call.positions.to(positions_dtype), slots=call.slots.to(slots_dtype)), op)


@every_op
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_token_counts(op, num_tokens):
    check(make_sample(num_tokens, pool_size=320), op)


@every_dtype
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(dtype, head_dim):
    # With three heads a pool's row may end beside a multiple of a vector and begin at one.
    call = make_sample(num_kv_heads=3, head_dim=head_dim, dtype=dtype)
    check(call.clone())
    check(call, IN_PLACE)


@every_op
@pytest.mark.parametrize(("num_qo_heads", "num_kv_heads"), HEADS)
def test_heads(op, num_qo_heads, num_kv_heads):
    check(make_sample(9, num_qo_heads, num_kv_heads), op)


@pytest.mark.parametrize("rope_base", [1e6, 500000, 10000.5, 1.0, 0.3])
def test_rope_bases(rope_base):
    check(make_sample(rope_base=rope_base))


@every_op
@every_dtype
@pytest.mark.parametrize(
    "positions",
    [
        [-1, -2, -4095, 0, 1, 2, -(2**31)],
        [2**31, 2**33, 2**40, -(2**31) - 1, -(2**40), 2**63 - 1, -(2**63)],
    ],
    ids=["negative", "beyond_int32"],
)
def test_positions(op, dtype, positions):
    check(make_sample(dtype=dtype).with_(positions=torch.tensor(positions)), op)


@every_op
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_half_results_are_correctly_rounded(op, dtype):
    call = make_sample(MANY, pool_size=MANY, dtype=dtype)
    before = call.clone()
    for got, x in zip(call.run(op)[:2], (before.q, before.k), strict=True):
        right = bits(got) == bits(round_once(rotated(x, before), dtype))
        # float32's error is a 2^-12th (float16) of the output's step: a tie is decided wrongly that often.
        assert right.double().mean() >= 0.995


@every_dtype
@pytest.mark.parametrize("scale", ["subnormal", "largest"])
def test_magnitudes(dtype, scale):
    info = torch.finfo(dtype)
    call = make_sample(MANY, pool_size=MANY, dtype=dtype)
    generator = torch.Generator().manual_seed(1)

    def numbers(t: Tensor) -> Tensor:
        uniform = 2 * torch.rand(t.shape, generator=generator, dtype=torch.float64) - 1
        return (uniform * (0.99 * info.max if scale == "largest" else 8 * info.smallest_normal)).to(dtype)

    call = call.with_(q=numbers(call.q), k=numbers(call.k))
    if scale == "largest":
        exact = rotated(call.q, call)
        assert (exact.abs() > info.max).any()  # or the case tests nothing
    check(call)


def assert_every_half_goes_through_unchanged(dtype: torch.dtype) -> None:
    # At position 0 the pair (x, 0) stays (x, 0): load and store, in the kernel's own loop.
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).reshape(32, 32, 64)
    call = make_sample(32, 32, 1, 128, dtype=dtype)
    call = call.with_(q=torch.cat([x, torch.zeros_like(x)], -1), positions=torch.zeros(32, dtype=torch.int32))
    got = call.run()[0][..., :64]
    number = ~x.isnan()
    assert torch.equal(bits(got)[number], bits(x)[number])
    assert got[~number].isnan().all()


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_every_half_goes_through_unchanged(dtype):
    assert_every_half_goes_through_unchanged(dtype)


def test_float16_subnormals_survive_a_flush_to_zero_mode():
    # They are normal numbers in float32. (bfloat16's are not, and are flushed in that mode.)
    torch.set_flush_denormal(True)
    try:
        assert_every_half_goes_through_unchanged(torch.float16)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("scaling", [1.0, 3e38])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_pattern_of_16_bits_turns_alike_by_any_loop(dtype, scaling):
    """Contiguous rows go two elements to a word, strided ones by themselves. NaN payloads are bits too."""
    patterns = torch.arange(2**16).to(torch.int16).view(512, 2, 64)
    for other in (0x3F80, 0x7F80, 0x7FC1, -0x7F, 0x0001, 0x7C01):
        both = torch.stack([patterns, torch.full_like(patterns, other)], dim=2)
        rows = torch.cat([both, both.flip(2)]).reshape(1024, 2, 128).view(dtype)
        call = make_sample(len(rows), 2, 2, 128, len(rows), dtype=dtype, max_position=2**20)
        call = call.with_(q=rows, k=rows, attention_scaling=scaling)
        strided = call.with_(q=laid_out(rows, "every_other_feature"))
        assert_same_bits(call.run()[0], strided.run()[0])


@every_op
@every_dtype
def test_nan_stays_nan_in_its_pair(op, dtype):
    call = make_sample(dtype=dtype)
    want = call.clone().run(op)
    call.q[3, 1, 5] = torch.nan
    call.k[4, 0, 63] = torch.nan
    got = call.run(op)
    for g, w, (token, head, pair) in zip(got[:2], want[:2], ((3, 1, 5), (4, 0, 31)), strict=True):
        hit = torch.zeros_like(w, dtype=torch.bool)
        hit[token, head, [pair, pair + 32]] = True
        assert g[hit].isnan().all()
        assert torch.equal(bits(g)[~hit], bits(w)[~hit])


@every_dtype
def test_infinity_goes_where_the_reference_says(dtype):
    call = make_sample(dtype=dtype)
    call.q[3, 1, 5] = torch.inf
    call.q[4, 0, 63] = -torch.inf
    exact = rotated(call.q, call)
    got = call.run()[0].double()
    assert exact.isinf().sum() == 4
    assert torch.equal(got[~exact.isfinite()], exact[~exact.isfinite()])


@every_op
@every_dtype
def test_v_is_copied_bit_for_bit(op, dtype):
    call = make_sample(MANY, pool_size=MANY, dtype=dtype)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    low, high = torch.iinfo(integers).min, torch.iinfo(integers).max
    generator = torch.Generator().manual_seed(1)
    v = torch.randint(low, high, call.v.shape, generator=generator, dtype=integers)
    v[:, 0, :3] = bits(torch.tensor([torch.nan, -torch.nan, -0.0], dtype=dtype)) + torch.tensor([1, 2, 0])
    check(call.with_(v=v.view(dtype)), op)


@every_op
@every_dtype
def test_other_rows_keep_every_bit(op, dtype):
    call = make_sample(dtype=dtype)
    for pool in (call.k_pool, call.v_pool):
        nans = bits(torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf], dtype=dtype)) + 5  # payloads
        bits(pool)[:, :, :4] = nans
        assert pool[:, :, :4].isnan().all()
        pool[:, :, 7] = -0.0
    check(call, op)


def test_bits():
    # Pinned, since they are to be the same on every machine and from every compiler.
    def numbers(*shape: int) -> Tensor:
        n = torch.arange(torch.tensor(shape).prod())
        return ((n * 7919 % 2003 - 1001).double() / 256).reshape(shape)  # exact in float32

    lines = []
    for dtype in DTYPES:
        call = make_sample(6, 3, 2, 80, dtype=dtype).with_(
            q=numbers(6, 3, 80).to(dtype),
            k=numbers(6, 2, 80).to(dtype),
            positions=torch.tensor([0, 1, -77, 131071, 2**31 - 1, 2**40]),
        )
        q_rot, k_rot, _, _ = call.run()
        digest = hashlib.sha256(bits(q_rot).numpy().tobytes() + bits(k_rot).numpy().tobytes())
        lines.append(f"{dtype} {digest.hexdigest()[:16]}")
    expecttest.assert_expected_inline(
        "\n".join(lines),
        """\
torch.float16 1f9a17bf3875bc0b
torch.bfloat16 0eca352a48d80bf1
torch.float32 1e621aea4f32ace5
torch.float64 e64f79ed563a9258""",
    )


# ---- What comes back


@every_op
def test_outputs_are_new_and_contiguous(op):
    call = make_sample()
    call = call.with_(q=place(call.q, (64, 7 * 64, 1)), k=place(call.k, (64, 7 * 64, 1)))
    result = OPS[op](*call.args, **call.kwargs)
    if op == IN_PLACE:
        assert result is None
        return
    inputs = {t.untyped_storage().data_ptr() for t in call.args}
    for got, x in zip(result[:2], (call.q, call.k), strict=True):
        assert got.is_contiguous()
        assert got.shape == x.shape
        assert got.untyped_storage().data_ptr() not in inputs
    if op == "rope_pool_fused":
        assert result[2] is call.k_pool
        assert result[3] is call.v_pool


@every_dtype
def test_the_three_ops_give_the_same_bits(dtype):
    call = make_sample(MANY, pool_size=MANY, dtype=dtype)
    want = call.clone().run()
    for op in OPS:
        for g, w in zip(call.clone().run(op), want, strict=True):
            assert_same_bits(g, w)


def test_python_functions_are_the_ops():
    call = make_sample()
    want = call.clone().run()
    fresh = call.clone()
    got = torch_ropepool.rope_pool_fused(*fresh.args, **fresh.kwargs)
    assert got[2] is fresh.k_pool
    assert got[3] is fresh.v_pool
    in_place = call.clone()
    assert torch_ropepool.rope_pool_fused_(*in_place.args, **in_place.kwargs) is None
    for result in (got, (in_place.q, in_place.k, in_place.k_pool, in_place.v_pool)):
        for g, w in zip(result, want, strict=True):
            assert_same_bits(g, w)


def test_tokens_one_by_one():
    call = make_sample(MANY, pool_size=MANY)
    whole = call.clone()
    q_rot, k_rot, k_pool, v_pool = whole.run()
    for t in range(MANY):
        names = ("q", "k", "v", "positions", "slots")
        one = call.with_(**{name: getattr(call, name)[t : t + 1] for name in names})
        q_one, k_one, _, _ = one.run()
        assert_same_bits(q_one[0], q_rot[t])
        assert_same_bits(k_one[0], k_rot[t])
    assert_same_bits(call.k_pool, k_pool)
    assert_same_bits(call.v_pool, v_pool)


# ---- Slots


@every_op
@pytest.mark.parametrize("num_tokens", [0, 7])
@pytest.mark.parametrize("pool_size", [0, 32])
def test_nothing_is_stored_for_negative_slots(op, num_tokens, pool_size):
    call = make_sample(num_tokens, pool_size=pool_size)
    slots = torch.tensor([-1, -2, -33, -(2**31), -1, -(2**40), -(2**63)])
    check(call.with_(slots=slots[:num_tokens]), op)


@every_op
@pytest.mark.parametrize("num_tokens", [7, MANY])
def test_some_slots_negative(op, num_tokens):
    call = make_sample(num_tokens, pool_size=num_tokens)
    call.slots[::3] = -1
    check(call, op)


SEAM = MANY // 2  # where the second of two threads begins


def slots_with_repeats() -> dict[str, Tensor]:
    ascending = torch.arange(MANY)
    return {
        "all_one": torch.full((MANY,), 3),
        # The second thread writes the slot at once, the first only when it is done.
        "at_the_seam": ascending.where(ascending != SEAM, SEAM - 1),
        # Not increasing, though each is greater than the one before it, -1.
        "negative_between": torch.tensor([5, -1] * SEAM),
        "first_and_last": ascending.where(ascending != MANY - 1, 0),
        "each_twice": torch.cat([ascending[:SEAM], ascending[:SEAM]]),
        "random": torch.randint(-2, 40, (MANY,), generator=torch.Generator().manual_seed(2)),
    }


@every_op
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("pattern", slots_with_repeats())
def test_the_later_token_of_a_slot_stays(op, num_threads, pattern):
    slots = slots_with_repeats()[pattern]
    for index_dtype in INDEX_DTYPES:
        check(make_sample(MANY, pool_size=MANY).with_(slots=slots.to(index_dtype)), op, num_threads)


@pytest.mark.parametrize("step", [1, 2**12])
@pytest.mark.parametrize("num_rows", [50, 700, 10**5])
def test_random_repeats_among_many_tokens(num_rows, step):
    # Slots far apart, in steps of a power of two, are what a weak hash would lump together.
    num_tokens = 5000  # of 56 bytes: shares begin at 1170
    generator = torch.Generator().manual_seed(num_rows)
    most = min(num_rows, 2**20 // step)
    slots = torch.randint(-most // 10, most, (num_tokens,), generator=generator) * step
    call = make_sample(num_tokens, 1, 1, 2, 2**20).with_(slots=slots)
    before = call.clone()
    with threads(2):
        _, k_rot, k_pool, v_pool = call.run()
    last = {slot: token for token, slot in enumerate(slots.tolist()) if slot >= 0}
    assert len(last) < (slots >= 0).sum()  # there are repeats
    rows, tokens = torch.tensor(list(last)), torch.tensor(list(last.values()))
    for pool, x, old in ((k_pool, k_rot, before.k_pool), (v_pool, call.v, before.v_pool)):
        want = old.clone()
        want[rows] = x[tokens]
        assert_same_bits(pool, want)


OUT_OF_RANGE = [  # index dtype, slot
    (torch.int32, 32),
    (torch.int32, 2**31 - 1),
    (torch.int64, 32),
    (torch.int64, 2**32),  # 0 in its lower half
    (torch.int64, 2**63 - 1),
]


@every_op
@pytest.mark.parametrize("at", ["first", "last"])
@pytest.mark.parametrize(("index_dtype", "slot"), OUT_OF_RANGE)
def test_nothing_is_written_when_a_slot_is_out_of_range(op, at, index_dtype, slot):
    call = make_sample(index_dtype=index_dtype)
    call.slots[0 if at == "first" else -1] = slot
    before = call.clone()
    with pytest.raises(IndexError):
        call.run(op)
    for got, want in zip(call.args, before.args, strict=True):
        assert_same_bits(got, want)


@every_op
def test_nothing_is_written_when_the_last_of_many_slots_is_out_of_range(op):
    call = make_sample(MANY, pool_size=MANY)
    call.slots[-1] = MANY
    before = call.clone()
    with pytest.raises(IndexError), threads(2):
        call.run(op)
    for got, want in zip(call.args, before.args, strict=True):
        assert_same_bits(got, want)


@every_op
def test_text_of_a_slot_out_of_range(op):
    texts = []
    for token, (index_dtype, slot) in enumerate(OUT_OF_RANGE):
        call = make_sample(index_dtype=index_dtype)
        call.slots[token] = slot
        with pytest.raises(IndexError) as error:
            call.run(op)
        texts.append(str(error.value))
    call = make_sample(1, pool_size=1)
    with pytest.raises(IndexError) as error:
        call.with_(k_pool=call.k_pool[:0], v_pool=call.v_pool[:0]).run(op)
    texts.append(str(error.value))
    expecttest.assert_expected_inline(
        "\n".join(texts),
        """\
slots[0] is 32, out of range for pool_size 32; a negative slot means: do not store
slots[1] is 2147483647, out of range for pool_size 32; a negative slot means: do not store
slots[2] is 32, out of range for pool_size 32; a negative slot means: do not store
slots[3] is 4294967296, out of range for pool_size 32; a negative slot means: do not store
slots[4] is 9223372036854775807, out of range for pool_size 32; a negative slot means: do not store
slots[0] is 0, out of range for pool_size 0; a negative slot means: do not store""",
    )


# ---- Layouts: same bits as from contiguous tensors, and nothing beside the views is touched

LAYOUTS = {  # of a [n, heads, d] tensor: strides and offset
    "offset": lambda n, h, d: ((h * d, d, 1), 3),
    "heads_first": lambda n, h, d: ((d, n * d, 1), 0),
    "features_first": lambda n, h, d: ((h, 1, n * h), 0),
    "tokens_last": lambda n, h, d: ((1, n, n * h), 0),
    "every_other_feature": lambda n, h, d: ((2 * h * d, 2 * d, 2), 1),
    "gaps": lambda n, h, d: ((h * (d + 3) + 5, d + 3, 1), 7),
}


def laid_out(t: Tensor, layout: str) -> Tensor:
    return place(t, *LAYOUTS[layout](*t.shape))


@every_op
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("argument", ["q", "k", "v", "k_pool", "v_pool"])
def test_layouts(op, layout, argument):
    call = make_sample()
    want = call.clone().run(op)
    view = laid_out(getattr(call, argument), layout)
    beside = around(view)
    for g, w in zip(call.with_(**{argument: view}).run(op), want, strict=True):
        assert_same_bits(g, w)
    assert torch.equal(around(view), beside)


@every_op
@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_all_arguments(op, dtype, layout):
    call = make_sample(MANY, pool_size=MANY, dtype=dtype)
    names = ("q", "k", "v", "k_pool", "v_pool")
    views = {name: laid_out(getattr(call, name), layout) for name in names}
    beside = {name: around(view) for name, view in views.items()}
    for g, w in zip(call.with_(**views).run(op), call.run(op), strict=True):
        assert_same_bits(g, w)
    for name, view in views.items():
        assert torch.equal(around(view), beside[name])
        assert_same_bits(view, getattr(call, name))


@pytest.mark.parametrize("argument", ["q", "k", "v"])
@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_expanded(argument, dims):
    call = make_sample()
    t = getattr(call, argument)
    shape = [1 if d in dims else size for d, size in enumerate(t.shape)]
    expanded = t[tuple(slice(size) for size in shape)].expand(t.shape)
    want = call.clone().with_(**{argument: expanded.contiguous()}).run()
    for g, w in zip(call.with_(**{argument: expanded}).run(), want, strict=True):
        assert_same_bits(g, w)


@every_op
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("stride", [0, 2, 5])
@pytest.mark.parametrize("argument", ["positions", "slots"])
@pytest.mark.parametrize("num_tokens", [7, MANY])
def test_strided_positions_and_slots(op, index_dtype, stride, argument, num_tokens):
    call = make_sample(num_tokens, pool_size=num_tokens, index_dtype=index_dtype)
    t = getattr(call, argument)
    view = t[:1].expand(num_tokens) if stride == 0 else place(t, (stride,), 3)
    want = call.clone().with_(**{argument: view.contiguous()}).run(op)
    for g, w in zip(call.with_(**{argument: view}).run(op), want, strict=True):
        assert_same_bits(g, w)


def pack_qkv(call: Sample) -> tuple[Tensor, Sample]:
    """One packed projection [num_tokens, (num_qo_heads + 2 num_kv_heads) * head_dim] and its slices."""
    qkv = torch.cat([t.flatten(1) for t in (call.q, call.k, call.v)], dim=1)
    sizes = [t[0].numel() for t in (call.q, call.k, call.v)]
    slices = [s.unflatten(1, (-1, call.kwargs["head_dim"])) for s in qkv.split(sizes, dim=1)]
    return qkv, call.with_(q=slices[0], k=slices[1], v=slices[2])


@every_op
@every_dtype
@pytest.mark.parametrize("num_tokens", [1, 7, MANY])
def test_packed_qkv(op, dtype, num_tokens):
    call = make_sample(num_tokens, pool_size=MANY, dtype=dtype)
    before, _ = pack_qkv(call)
    qkv, packed = pack_qkv(call.clone())
    want = call.run(op)
    for g, w in zip(packed.run(op), want, strict=True):
        assert_same_bits(g, w)
    assert_same_bits(qkv, pack_qkv(call)[0] if op == IN_PLACE else before)


@every_op
def test_packed_qkv_and_pool_views_are_not_copied(op):
    buffer = torch.zeros(3, 2, MANY, 2, 64)
    call = make_sample(MANY, pool_size=MANY).with_(k_pool=buffer[1, 0], v_pool=buffer[1, 1])
    _, packed = pack_qkv(call)
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        packed.run(op)
    # No contiguous, clone or copy_, which the profiler would show, nor any other op inside.
    assert [event.name for event in profile.events()] == [f"ropepool::{op}"]


POOL_BUFFERS = {  # shape of a buffer for n rows of h heads of d, and where in it the two pools are
    "layers": (lambda n, h, d: (3, 2, n, h, d), lambda b: (b[1, 0], b[1, 1])),
    "layers_v_first": (lambda n, h, d: (3, 2, n, h, d), lambda b: (b[2, 1], b[2, 0])),
    "interleaved_rows": (lambda n, h, d: (n, 2, h, d), lambda b: (b[:, 0], b[:, 1])),
    "interleaved_heads": (lambda n, h, d: (n, h, 2, d), lambda b: (b[:, :, 0], b[:, :, 1])),
    "interleaved_features": (lambda n, h, d: (n, h, d, 2), lambda b: (b[..., 0], b[..., 1])),
    "heads_first": (lambda n, h, d: (2, h, n, d), lambda b: (b[0].transpose(0, 1), b[1].transpose(0, 1))),
    "every_third_row": (lambda n, h, d: (3 * n, h, d), lambda b: (b[::3], b[1::3])),
}


@every_op
@every_dtype
@pytest.mark.parametrize("name", POOL_BUFFERS)
def test_pools_in_one_buffer(op, dtype, name):
    call = make_sample(MANY, pool_size=MANY + 1, dtype=dtype)
    shape, views = POOL_BUFFERS[name]
    buffer = torch.randn(shape(MANY + 1, 2, 64), generator=torch.Generator().manual_seed(1)).to(dtype)
    k_pool, v_pool = views(buffer)
    in_buffer = call.clone().with_(k_pool=k_pool, v_pool=v_pool)
    apart = call.with_(k_pool=k_pool.clone(), v_pool=v_pool.clone())
    want_buffer = buffer.clone()
    want = apart.run(op)
    for g, w in zip(in_buffer.run(op), want, strict=True):
        assert_same_bits(g, w)
    for view, pool in zip(views(want_buffer), want[2:], strict=True):
        view.copy_(pool)
    assert_same_bits(buffer, want_buffer)


# ---- Threads and instruction sets


@every_op
@every_dtype
def test_same_bits_at_any_thread_count(op, dtype):
    call = make_sample(MANY, pool_size=MANY, dtype=dtype)
    want = call.clone().run(op)
    for num_threads in (2, 3):
        with threads(num_threads):
            got = call.clone().run(op)
        for g, w in zip(got, want, strict=True):
            assert_same_bits(g, w)


def run_in_threads(work: Callable[[int], None], num_threads: int = 8) -> None:
    """Runs work(0), work(1), ... at once; raises what one of them raised."""
    barrier = threading.Barrier(num_threads)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            barrier.wait()
            work(i)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=run, args=(i,)) for i in range(num_threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]


@every_op
def test_threads_on_disjoint_slots_of_one_pool(op):
    call = make_sample(8 * MANY, pool_size=8 * MANY)
    want = call.clone().run(op)
    parts = [
        call.with_(**{name: getattr(call, name)[i::8] for name in ("q", "k", "v", "positions", "slots")})
        for i in range(8)
    ]
    results: list[tuple[Tensor, ...]] = [()] * 8

    def work(i: int) -> None:
        results[i] = parts[i].run(op)

    run_in_threads(work)
    for i, (q_rot, k_rot, _, _) in enumerate(results):
        assert_same_bits(q_rot, want[0][i::8])
        assert_same_bits(k_rot, want[1][i::8])
    assert_same_bits(call.k_pool, want[2])
    assert_same_bits(call.v_pool, want[3])


def test_threads_race_for_the_first_use_of_a_base():
    # Used nowhere else, more than are cached, and each thread comes to them in an order of its own.
    bases = [20000.25 + i for i in range(500)]
    call = make_sample(1, 1, 1, 4, dtype=torch.float64)
    call = call.with_(slots=torch.full_like(call.slots, -1))
    want = {base: rotated(call.q, call.with_(rope_base=base)) for base in bases}
    error = torch.zeros(8)

    def work(i: int) -> None:
        order = random.Random(i)
        for base in order.sample(bases, len(bases)) * 2:
            got = call.with_(rope_base=base).run()[0]
            error[i] = max(error[i], (got - want[base]).abs().max())

    run_in_threads(work)
    assert error.max() < 1e-14  # a few units in the last place of numbers below 8


def results_of_this_process() -> list[Tensor]:
    """Outputs and pools of calls that reach every loop of the kernel."""
    results = []
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            for layout in ("offset", "every_other_feature"):
                call = make_sample(9, head_dim=head_dim, dtype=dtype)
                positions = torch.tensor([0, 1, -1, 77, 131071, 2**31 - 1, -(2**31), 2**33, -(2**62)])
                call = call.with_(positions=positions, q=laid_out(call.q, layout), v=laid_out(call.v, layout))
                results += [t.contiguous() for t in call.run()]
            for variant in ({"interleaved": True}, {"rotary_dim": head_dim // 4 * 2 or 2}):
                results += make_sample(9, head_dim=head_dim, dtype=dtype).with_(**variant).run()
    return results


def run_python(code: str, *args: str, isa: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own, with this package and these tests, and one instruction set."""
    folders = [Path(torch_ropepool.__file__).parents[1], Path(__file__).parent]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders),
        "TORCH_ROPEPOOL_CPU_ISA": isa,
    }
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


ISA_ERROR = r"RuntimeError: TORCH_ROPEPOOL_CPU_ISA must be one of (.+) on this machine, got mmx\n"


def instruction_sets() -> list[str]:
    """Those of this machine, which the error for one that is not there names."""
    code = "import torch_ropepool, sample; sample.make_sample().run()"
    refused = re.search(ISA_ERROR, run_python(code, isa="mmx").stderr)
    assert refused
    return refused[1].split(", ")


def test_an_instruction_set_that_is_not_there_is_named():
    code = "from torch_ropepool.__main__ import main; raise SystemExit(main())"
    done = run_python(code, "--device", "cpu", isa="mmx")
    assert "CPU instruction set:  not the one that TORCH_ROPEPOOL_CPU_ISA names\n" in done.stdout
    assert re.search(ISA_ERROR, done.stdout)
    assert done.returncode == 1


def test_same_bits_from_every_instruction_set(tmp_path):
    names = instruction_sets()
    assert names[-1] == "baseline"  # always there
    want = results_of_this_process()
    for name in names:
        file = tmp_path / f"{name}.pt"
        code = (
            "import sys, torch, torch_ropepool, test_rope_pool\n"
            "torch.save(test_rope_pool.results_of_this_process(), sys.argv[1])\n"
            "print(torch_ropepool._library.LIBRARY.rope_pool_cpu_isa().decode())"
        )
        done = run_python(code, str(file), isa=name)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{name}\n"
        for g, w in zip(torch.load(file), want, strict=True):
            assert_same_bits(g, w)


# ---- Autograd: there is no backward

DIFFERENTIABLE = ("q", "k", "v", "k_pool", "v_pool")


@every_op
def test_requires_grad_is_an_error(op):
    texts = []
    for name in DIFFERENTIABLE:
        call = make_sample()
        before = call.clone()
        leaf = getattr(call, name).requires_grad_()
        for t in (leaf, leaf * 1):
            with pytest.raises(RuntimeError) as error:
                call.with_(**{name: t}).run(op)
        texts.append(str(error.value))
        for got, want in zip(call.args, before.args, strict=True):
            assert_same_bits(got, want)
    expecttest.assert_expected_inline(
        "\n".join(texts),
        """\
rope_pool_fused has no backward, but q requires grad: call it under torch.no_grad(), or detach q
rope_pool_fused has no backward, but k requires grad: call it under torch.no_grad(), or detach k
rope_pool_fused has no backward, but v requires grad: call it under torch.no_grad(), or detach v
rope_pool_fused has no backward, but k_pool requires grad: call it under torch.no_grad(), or detach k_pool
rope_pool_fused has no backward, but v_pool requires grad: call it under torch.no_grad(), or detach v_pool""",
    )


@every_op
@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_requires_grad_is_fine_without_grad_mode(op, name, mode):
    call = make_sample()
    want = call.clone().run(op)
    getattr(call, name).requires_grad_()
    with mode():
        got = call.run(op)
        for g, w in zip(got, want, strict=True):
            assert_same_bits(g, w)
    if op != IN_PLACE:
        assert not got[0].requires_grad
        assert not got[1].requires_grad


@every_op
def test_inference_tensors(op):
    want = make_sample().run(op)
    with torch.inference_mode():
        call = make_sample()
    for g, w in zip(call.run(op), want, strict=True):  # also outside of inference mode
        assert_same_bits(g, w)


@pytest.mark.parametrize("name", ["k_pool", "v_pool", "q", "k"])
def test_autograd_sees_that_a_tensor_was_written(name):
    # Backward needs the tensor that was multiplied; torch's own in-place ops make it raise RuntimeError.
    call = make_sample()
    weight = torch.ones_like(getattr(call, name), requires_grad=True)
    y = (weight * getattr(call, name)).sum()
    call.run(IN_PLACE)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# ---- Offsets of more than 32 bits. The memory is only reserved: untouched pages cost nothing.


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_pools_of_more_than_2_to_31_elements(index_dtype):
    row, rows = 128, 2**24 + 8
    pools = [torch.empty(rows, 1, row, dtype=torch.bfloat16) for _ in range(2)]
    assert pools[0].numel() > 2**31
    low, high = (
        slice(0, 8),
        slice(2**24 - 1, rows),
    )  # an offset in bytes, cut to 32 bits, ends up in the low rows
    for pool in pools:
        pool[low] = 1
        pool[high] = 2
    slots = torch.tensor([rows - 1, 2**24, 2**24 - 1], dtype=index_dtype)
    call = make_sample(3, 1, 1, row, dtype=torch.bfloat16).with_(
        slots=slots, k_pool=pools[0], v_pool=pools[1]
    )
    _, k_rot, k_pool, v_pool = call.run()
    for pool, x in ((k_pool, k_rot), (v_pool, call.v)):
        assert (pool[low] == 1).all()
        for token, slot in enumerate(slots.tolist()):
            assert_same_bits(pool[slot], x[token])
        assert (pool[2**24 + 1 : rows - 1] == 2).all()


@every_op
@pytest.mark.parametrize("dim", [0, 1, 2], ids=["tokens", "heads", "features"])
def test_strides_that_reach_beyond_2_to_31_elements(op, dim):
    call = make_sample(3, 3, 3, 4, 3, dtype=torch.bfloat16)
    want = call.clone().run(op)
    buffer = torch.empty(2**31 + 2**16, dtype=torch.bfloat16)
    for i, name in enumerate(("q", "k", "v", "k_pool", "v_pool")):
        t = getattr(call, name)
        strides = [100, 10, 1]
        strides[dim] = -(-(2**31) // (t.shape[dim] - 1))
        call = call.with_(**{name: buffer.as_strided(t.shape, strides, 4096 * i).copy_(t)})
    for g, w in zip(call.run(op), want, strict=True):
        assert_same_bits(g, w)


@pytest.mark.parametrize("argument", ["positions", "slots"])
def test_strided_indices_beyond_2_to_31_elements(argument):
    call = make_sample(3)
    want = call.clone().run()
    view = torch.empty(2**31 + 2, dtype=torch.int32).as_strided((3,), (2**30,)).copy_(getattr(call, argument))
    for g, w in zip(call.with_(**{argument: view}).run(), want, strict=True):
        assert_same_bits(g, w)
