"""Every RoPE variant and pool layout, alone and in pairs, against the reference in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import mpmath
import pytest
import torch
from checks import assert_same_bits, check, rotated, threads
from sample import OPS, Sample, bits, make_sample
from torch import Tensor

from torch_ropepool import reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HEAD_DIM = 80
POOL_SIZE = 320

# What each argument may be. A value is what is passed, or what `apply` below makes of it.
VALUES: dict[str, tuple[Any, ...]] = {
    "inv_freq": (None, torch.float32, torch.float64),
    "attention_scaling": (1.0, 1.1957, -0.5),
    "rotary_dim": (None, 2, 32, 78, HEAD_DIM),
    "interleaved": (False, True),
    "pools": ("rows", "pages of 1", "NHD", "HND", "combined"),
    "mrope": (None, "runs", "in turn", "one axis"),
}
PAIRS = list(itertools.combinations(VALUES, 2))


def make_inv_freq(num_pairs: int, dtype: torch.dtype) -> Tensor:
    """Frequencies as no base gives them: not in order, one of them zero, one negative."""
    inv_freq = torch.rand(num_pairs, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) ** 4
    if num_pairs > 2:
        inv_freq[1], inv_freq[2] = 0, -inv_freq[2]
    return inv_freq.to(dtype)


def paged(pool: Tensor, page_size: int, layout: str) -> Tensor:
    """The pool's rows as `[num_pages, page_size, num_kv_heads, head_dim]` in one of the usual layouts."""
    rows = pool.view(-1, page_size, *pool.shape[1:])
    if layout == "NHD":
        return rows.clone()
    return rows.transpose(1, 2).contiguous().transpose(1, 2)  # HND


def apply(sample: Sample, **values: Any) -> Sample:
    """The sample with these of VALUES."""
    kwargs: dict[str, Any] = {}
    head_dim = sample.kwargs["head_dim"]
    num_pairs = (values.get("rotary_dim") or head_dim) // 2
    for name in ("attention_scaling", "rotary_dim", "interleaved"):
        if name in values:
            kwargs[name] = values[name]
    if values.get("inv_freq") is not None:
        kwargs |= {"rope_base": None, "inv_freq": make_inv_freq(num_pairs, values["inv_freq"])}
    pools, k_pool, v_pool = values.get("pools", "rows"), sample.k_pool, sample.v_pool
    if pools == "combined":  # k and v of a page side by side in one buffer
        both = torch.stack(
            [k_pool.view(-1, 16, *k_pool.shape[1:]), v_pool.view(-1, 16, *v_pool.shape[1:])], 1
        )
        kwargs |= {"page_size": 16, "k_pool": both[:, 0], "v_pool": both[:, 1]}
    elif pools != "rows":
        page_size, layout = (1, "NHD") if pools == "pages of 1" else (16, pools)
        kwargs["page_size"] = page_size
        kwargs |= {"k_pool": paged(k_pool, page_size, layout), "v_pool": paged(v_pool, page_size, layout)}
    if values.get("mrope") is not None:
        third = num_pairs // 3
        section = (
            [0, num_pairs, 0] if values["mrope"] == "one axis" else [num_pairs - 2 * third, third, third]
        )
        positions = torch.stack([sample.positions, sample.positions.flip(0) + 7, 3 * sample.positions])
        kwargs |= {"mrope_section": section, "positions": positions}
        kwargs["mrope_interleaved"] = values["mrope"] == "in turn"
    return sample.with_(**kwargs)


def combinations(pair: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        dict(zip(pair, values, strict=True)) for values in itertools.product(*(VALUES[name] for name in pair))
    ]


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
@pytest.mark.parametrize("op", OPS)
def test_pairs_of_arguments(op, pair):
    for values in combinations(pair):
        check(apply(make_sample(9, head_dim=HEAD_DIM, pool_size=POOL_SIZE), **values), op)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype, name):
    for value in VALUES[name]:
        check(apply(make_sample(9, head_dim=HEAD_DIM, pool_size=POOL_SIZE, dtype=dtype), **{name: value}))


ALL_AT_ONCE = {
    "inv_freq": torch.float32,
    "attention_scaling": 1.1957,
    "rotary_dim": 32,
    "interleaved": True,
    "pools": "HND",
    "mrope": "in turn",
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("head_dim", [33, 64, 81, 600])
def test_all_at_once(op, head_dim):
    check(apply(make_sample(9, head_dim=head_dim, pool_size=POOL_SIZE), **ALL_AT_ONCE), op)


@pytest.mark.parametrize("rotary_dim", [2, 254, 256, 258, 600])
@pytest.mark.parametrize("mrope", VALUES["mrope"])
def test_tiles_of_angles(mrope, rotary_dim):
    """128 pairs are one tile of the CPU kernel."""
    check(apply(make_sample(3, head_dim=601), rotary_dim=rotary_dim, mrope=mrope))


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("op", OPS)
def test_same_bits_at_any_thread_count(op, name):
    for value in VALUES[name]:
        call = apply(make_sample(300, head_dim=HEAD_DIM, pool_size=POOL_SIZE), **{name: value})
        results = []
        for num_threads in (1, 2):
            with threads(num_threads):
                results.append(call.clone().run(op))
        for one, two in zip(*results, strict=True):
            assert_same_bits(one, two)


@pytest.mark.parametrize("name", VALUES)
def test_same_bits_for_any_strides(name):
    """q, k and v as slices of a packed projection, and with a last stride of 2."""
    for value in VALUES[name]:
        call = apply(make_sample(9, head_dim=HEAD_DIM, pool_size=POOL_SIZE), **{name: value})
        expected = call.clone().run()
        packed = torch.cat([call.q, call.k, call.v], dim=1).split([4, 2, 2], dim=1)
        spread = [torch.stack([x, -x], dim=-1)[..., 0] for x in (call.q, call.k, call.v)]
        for q, k, v in (packed, spread):
            got = call.clone().with_(q=q, k=k, v=v).run()
            for a, b in zip(got, expected, strict=True):
                assert_same_bits(a, b)


def test_defaults_change_nothing():
    call = make_sample()
    expected = call.clone().run()
    got = call.with_(
        inv_freq=None,
        attention_scaling=1.0,
        rotary_dim=64,
        interleaved=False,
        page_size=None,
        mrope_section=None,
        mrope_interleaved=False,
    ).run()
    for a, b in zip(got, expected, strict=True):
        assert_same_bits(a, b)


# ---- inv_freq


def test_frequencies_are_rounded_correctly():
    """Against mpmath, over all exponents of float32 and float64: at position 2^62 a unit in the 64-bit
    frequency is an angle of 2^-2 turn, so a float64 cosine shows any other rounding."""
    generator = torch.Generator().manual_seed(0)
    singles = torch.randint(0, 2**31, (600,), generator=generator).to(torch.int32).view(torch.float32)
    doubles = torch.randint(0, 2**63 - 1, (600,), generator=generator).view(torch.float64)
    extremes = [5e-324, 2.0**-1022, 1.7976931348623157e308, 1.0, 2 * math.pi, 0.0, -0.0]
    for inv_freq in (
        singles[singles.isfinite()],
        doubles[doubles.isfinite()],
        torch.tensor(extremes, dtype=torch.float64),
    ):
        inv_freq = torch.cat([inv_freq, -inv_freq])
        head_dim = 2 * len(inv_freq)
        call = make_sample(2, 1, 1, head_dim, dtype=torch.float64, index_dtype=torch.int64).with_(
            positions=torch.tensor([2**62 + 12345, 3]), rope_base=None, inv_freq=inv_freq
        )
        call.q.zero_()
        call.q[..., : len(inv_freq)] = 1
        got = call.run()[0][:, 0].unflatten(-1, (2, -1))
        with mpmath.workprec(2600):
            for token, position in enumerate(call.positions.tolist()):
                for pair, f in enumerate(inv_freq.tolist()):
                    turns = mpmath.frac(position * mpmath.mpf(f) / (2 * mpmath.pi))
                    angle = 2 * mpmath.pi * turns
                    # 2^-96 turn times the position, and float64's own rounding.
                    bound = 1e-15 + 7 * position * 2.0**-96
                    assert abs(got[token, 0, pair].item() - mpmath.cos(angle)) < bound
                    assert abs(got[token, 1, pair].item() - mpmath.sin(angle)) < bound


def test_inv_freq_equals_base():
    """The frequencies of a base, as float64 rounds them, turn as the base does at small positions."""
    call = make_sample(dtype=torch.float64, max_position=100)
    inv_freq = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    expected = call.clone().run()
    for a, b in zip(call.with_(rope_base=None, inv_freq=inv_freq).run(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)  # 100 rad, of which 2^-53 each


def test_float32_inv_freq_is_taken_exactly():
    call = make_sample(dtype=torch.float64)
    inv_freq = make_inv_freq(32, torch.float32)
    expected = call.clone().with_(rope_base=None, inv_freq=inv_freq.double()).run()
    for a, b in zip(call.with_(rope_base=None, inv_freq=inv_freq).run(), expected, strict=True):
        assert_same_bits(a, b)


def test_strided_inv_freq():
    inv_freq = make_inv_freq(32, torch.float32)
    call = make_sample().with_(rope_base=None)
    expected = call.clone().with_(inv_freq=inv_freq).run()
    for strided in (torch.stack([inv_freq, -inv_freq], dim=1)[:, 0], torch.cat([-inv_freq, inv_freq])[32:]):
        for a, b in zip(call.clone().with_(inv_freq=strided).run(), expected, strict=True):
            assert_same_bits(a, b)


def test_inv_freq_that_changes_between_calls():
    """Its values are what counts, not its memory: dynamic scaling writes new ones into the same tensor."""
    inv_freq = make_inv_freq(32, torch.float32)
    call = make_sample().with_(rope_base=None, inv_freq=inv_freq)
    for _ in range(3):
        check(call.clone().with_(inv_freq=inv_freq))
        inv_freq.mul_(0.9)
        check(call.clone().with_(inv_freq=inv_freq))


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_tokens", [0, 7])
def test_inv_freq_must_be_finite(op, bad, num_tokens):
    call = make_sample(num_tokens).with_(rope_base=None, inv_freq=make_inv_freq(32, torch.float32))
    call.kwargs["inv_freq"][5] = bad
    before = call.clone()
    with pytest.raises(ValueError, match=f"^inv_freq must be finite, got {bad} at index 5$"):
        call.run(op)
    for a, b in zip(call.args, before.args, strict=True):
        assert_same_bits(a, b)


# ---- The others


def test_features_that_do_not_turn_keep_every_bit():
    call = make_sample(head_dim=65).with_(rotary_dim=32, attention_scaling=2.0)
    payload = torch.arange(0x7FC00001, 0x7FC00001 + 7 * 2 * 33, dtype=torch.int32).view(torch.float32)
    call.k[..., 32:] = payload.view(7, 2, 33)
    k_rot, k_pool = call.clone().run()[1:3]
    assert_same_bits(k_rot[..., 32:], call.k[..., 32:])
    assert_same_bits(k_pool[call.slots.long(), :, 32:], call.k[..., 32:])


def test_paged_slots_are_pages_and_offsets():
    call = apply(make_sample(pool_size=POOL_SIZE), pools="HND")
    k_rot, k_pool = call.run()[1:3]
    for token, slot in enumerate(call.slots.tolist()):
        assert torch.equal(k_pool[slot // 16, slot % 16], k_rot[token])


@pytest.mark.parametrize("op", OPS)
def test_paged_slot_out_of_range(op):
    call = apply(make_sample(pool_size=POOL_SIZE), pools="HND")
    call.slots[3] = POOL_SIZE
    before = call.clone()
    with pytest.raises(IndexError, match=r"^slots\[3\] is 320, out of range for pool_size 320; "):
        call.run(op)
    for a, b in zip(call.args, before.args, strict=True):
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("interleaved", [False, True])
def test_mrope_of_equal_rows_is_plain_rope(interleaved):
    """Qwen2-VL says so of text: its three positions are the same. Near 2^31 each bit of a phase shows."""
    call = make_sample(300, pool_size=320)
    call = call.with_(positions=2**31 - 1 - call.positions)
    expected = call.clone().run()
    got = call.with_(
        positions=call.positions.expand(3, -1), mrope_section=[16, 8, 8], mrope_interleaved=interleaved
    ).run()
    for a, b in zip(got, expected, strict=True):
        assert_same_bits(a, b)


def test_mrope_axes():
    """The two layouts, written out: Qwen2-VL's runs, and Qwen3-VL's turns T H W T H W … T T."""
    assert reference.mrope_axes(8, [4, 2, 2], False) == [0, 0, 0, 0, 1, 1, 2, 2]
    assert reference.mrope_axes(8, [4, 2, 2], True) == [0, 1, 2, 0, 1, 2, 0, 0]
    assert reference.mrope_axes(6, [0, 3, 3], True) == [0, 1, 2, 0, 1, 2]  # more than there are turns


def test_mrope_with_more_pairs_than_turns():
    """As transformers takes [8, 12, 12] for 32 pairs: 11, 11 and 10."""
    call = make_sample()
    positions = torch.stack([call.positions, call.positions + 5, call.positions * 2])
    check(call.with_(positions=positions, mrope_section=[8, 12, 12], mrope_interleaved=True))


def test_mrope_at_huge_positions():
    """One of the three beyond 32 bits takes the other path of the kernel."""
    call = make_sample(3, index_dtype=torch.int64)
    positions = torch.tensor([[5, 2**40, -(2**50)], [6, 7, 8], [9, 10, 2**33]])
    check(call.with_(positions=positions, mrope_section=[8, 12, 12]))


def test_attention_scaling_scales_what_turns():
    call = make_sample(head_dim=80).with_(rotary_dim=32, attention_scaling=0.0)
    q_rot = call.run()[0]
    assert not q_rot[..., :32].any()
    assert torch.equal(q_rot[..., 32:], call.q[..., 32:])
    assert not rotated(call.q, call)[..., :32].any()
