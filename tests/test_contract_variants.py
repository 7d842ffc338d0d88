"""The contract of the keyword arguments with defaults: exact messages, the same from every kernel, in order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from checks import assert_same_bits
from expecttest import assert_expected_inline
from sample import OPS, TENSOR_NAMES, Sample, ViewSpec, make_spec
from test_contract import PLAIN_WAYS, WRAPPING_WAYS, error_of

# What is wrong, as changes of a good call (num_tokens 4, 8 and 2 heads of 64, 128 pool rows): shapes of
# tensors, "dtype" of inv_freq, its place in another tensor's memory, or keyword arguments.
INV_FREQ = {"inv_freq": (32,), "rope_base": None}
PAGED = {"k_pool": (8, 16, 2, 64), "v_pool": (8, 16, 2, 64)}
MROPE = {"positions": (3, 4), "mrope_section": [16, 8, 8]}
BROKEN: dict[str, dict[str, Any]] = {
    "positions 1-D with mrope": {**MROPE, "positions": (4,)},
    "positions of four axes": {**MROPE, "positions": (4, 4)},
    "positions of another count": {**MROPE, "positions": (3, 5)},
    "positions 2-D without mrope": {"positions": (3, 4)},
    "pools 4-D without page_size": PAGED,
    "pools 3-D with page_size": {"page_size": 16},
    "paged k_pool of other heads": {**PAGED, "k_pool": (8, 16, 3, 64), "page_size": 16},
    "paged v_pool of other pages": {**PAGED, "v_pool": (9, 16, 2, 64), "page_size": 16},
    "both": {"inv_freq": (32,)},
    "neither": {"rope_base": None},
    "rope_base 0": {"rope_base": 0.0},
    "inv_freq too short": {**INV_FREQ, "inv_freq": (31,)},
    "inv_freq of half of rotary_dim": {**INV_FREQ, "rotary_dim": 32},
    "inv_freq 2-D": {**INV_FREQ, "inv_freq": (1, 32)},
    "inv_freq float16": {**INV_FREQ, "dtype": torch.float16},
    "inv_freq int32": {**INV_FREQ, "dtype": torch.int32},
    "inv_freq on another device": {**INV_FREQ, "device": "meta"},
    "inv_freq without storage": {**INV_FREQ, "storage_bytes": 0},
    "inv_freq in k_pool": {**INV_FREQ, "inside": "k_pool"},
    "inv_freq in v_pool": {**INV_FREQ, "inside": "v_pool"},
    "attention_scaling NaN": {"attention_scaling": math.nan},
    "attention_scaling infinite": {"attention_scaling": -math.inf},
    "attention_scaling beyond float32": {"attention_scaling": 1e39},
    "rotary_dim odd": {"rotary_dim": 31},
    "rotary_dim 0": {"rotary_dim": 0},
    "rotary_dim too large": {"rotary_dim": 66},
    "head_dim odd without rotary_dim": {"q": (4, 8, 65), "k": (4, 2, 65), "v": (4, 2, 65), "k_pool": (128, 2, 65),
                                        "v_pool": (128, 2, 65), "head_dim": 65},
    "page_size of another pool": {**PAGED, "page_size": 8},
    "page_size 0": {"k_pool": (8, 0, 2, 64), "v_pool": (8, 0, 2, 64), "page_size": 0},
    "mrope_interleaved alone": {"mrope_interleaved": True},
    "mrope_section of two": {**MROPE, "mrope_section": [16, 16]},
    "mrope_section too small": {**MROPE, "mrope_section": [16, 8, 7]},
    "mrope_section that overflows": {**MROPE, "mrope_section": [2**63 - 1, 2**63 - 1, 34]},
    "mrope_section negative": {**MROPE, "mrope_section": [33, -1, 0]},
}  # fmt: skip
BROKEN_IN_PLACE: dict[str, dict[str, Any]] = {
    "inv_freq in q": {**INV_FREQ, "inside": "q"},
    "inv_freq in k": {**INV_FREQ, "inside": "k"},
}


def build(changes: dict[str, Any], device: str = "cpu") -> Sample:
    spec = make_spec()
    for name, value in changes.items():
        if name == "inv_freq":
            spec.views[name] = ViewSpec(value, torch.float32, "inv_freq")
        elif name in TENSOR_NAMES:
            spec.views[name].shape = value
        elif name == "inside":
            spec.views["inv_freq"].buffer = value
        elif name in ("dtype", "device", "storage_bytes"):
            setattr(spec.views["inv_freq"], name, value)
        else:
            spec.kwargs[name] = value
    return spec.build(device)


def message_table(broken: dict[str, dict[str, Any]], op: str) -> str:
    lines = []
    for name, changes in broken.items():
        error = error_of(lambda changes=changes: PLAIN_WAYS["cpu"](op, build(changes)))
        assert error is not None and error[0] == "ValueError", (name, error)
        lines.append(f"{name}: {error[1]}")
    return "\n".join(lines)


def test_messages():
    assert_expected_inline(
        message_table(BROKEN, "rope_pool_fused"),
        """\
positions 1-D with mrope: positions must be [3, num_tokens], got [4]
positions of four axes: positions must be [3, num_tokens], got [4, 4]
positions of another count: positions must be [3, num_tokens], got [3, 5]
positions 2-D without mrope: rope_pool_fused expects positions/slots to be 1-D, got positions [3, 4]
pools 4-D without page_size: rope_pool_fused expects pool tensors to be 3-D, got k_pool [8, 16, 2, 64]
hint: for a paged pool, pass page_size=16
pools 3-D with page_size: rope_pool_fused expects pool tensors to be 4-D, got k_pool [128, 2, 64]
paged k_pool of other heads: k_pool has incompatible shape [8, 16, 3, 64]: must be [num_pages, page_size, num_kv_heads, head_dim] with num_kv_heads 2, head_dim 64
paged v_pool of other pages: v_pool shape must match k_pool shape, got [9, 16, 2, 64] vs [8, 16, 2, 64]
both: exactly one of rope_base and inv_freq must be given, got both
neither: exactly one of rope_base and inv_freq must be given, got neither
rope_base 0: rope_base must be finite and positive, got 0
inv_freq too short: inv_freq shape must be [rotary_dim / 2], got [31] with rotary_dim 64
inv_freq of half of rotary_dim: inv_freq shape must be [rotary_dim / 2], got [32] with rotary_dim 32
inv_freq 2-D: inv_freq shape must be [rotary_dim / 2], got [1, 32] with rotary_dim 64
inv_freq float16: inv_freq must be float32 or float64, got float16
inv_freq int32: inv_freq must be float32 or float64, got int32
inv_freq on another device: all tensors must be on one device, got q on cpu, inv_freq on meta
inv_freq without storage: inv_freq needs a storage of 128 bytes, got one of 0
inv_freq in k_pool: k_pool and inv_freq must not overlap
inv_freq in v_pool: v_pool and inv_freq must not overlap
attention_scaling NaN: attention_scaling must be finite in float32, got nan
attention_scaling infinite: attention_scaling must be finite in float32, got -inf
attention_scaling beyond float32: attention_scaling must be finite in float32, got 1e+39
rotary_dim odd: rotary_dim must be even, at least 2 and at most head_dim, got 31 with head_dim 64
rotary_dim 0: rotary_dim must be even, at least 2 and at most head_dim, got 0 with head_dim 64
rotary_dim too large: rotary_dim must be even, at least 2 and at most head_dim, got 66 with head_dim 64
head_dim odd without rotary_dim: head_dim must be even and at least 2, got 65
page_size of another pool: page_size must be k_pool.shape[1] and at least 1, got 8 with k_pool [8, 16, 2, 64]
page_size 0: page_size must be k_pool.shape[1] and at least 1, got 0 with k_pool [8, 0, 2, 64]
mrope_interleaved alone: mrope_interleaved needs mrope_section
mrope_section of two: mrope_section must be 3 counts that sum up to rotary_dim / 2, got [16, 16] with rotary_dim 64
mrope_section too small: mrope_section must be 3 counts that sum up to rotary_dim / 2, got [16, 8, 7] with rotary_dim 64
mrope_section that overflows: mrope_section must be 3 counts that sum up to rotary_dim / 2, got [9223372036854775807, 9223372036854775807, 34] with rotary_dim 64
mrope_section negative: mrope_section must be 3 counts that sum up to rotary_dim / 2, got [33, -1, 0] with rotary_dim 64""",
    )


def test_messages_of_the_in_place_op():
    assert_expected_inline(
        message_table(BROKEN_IN_PLACE, "rope_pool_fused_"),
        """\
inv_freq in q: q and inv_freq must not overlap
inv_freq in k: k and inv_freq must not overlap""",
    )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("way", PLAIN_WAYS)
def test_the_same_everywhere(way, op):
    broken = {**BROKEN, **(BROKEN_IN_PLACE if op == "rope_pool_fused_" else {})}
    for name, changes in broken.items():
        if way == "meta" and ("device" in changes or "storage_bytes" in changes):
            continue  # on meta nothing is on another device, and a storage cannot be cut
        expected = error_of(lambda changes=changes: PLAIN_WAYS["cpu"](op, build(changes)))
        device = "meta" if way == "meta" else "cpu"
        sample = build(changes, device)
        assert error_of(lambda sample=sample: PLAIN_WAYS[way](op, sample)) == expected, name


@pytest.mark.parametrize("way", WRAPPING_WAYS)
@pytest.mark.parametrize(
    "name", ["both", "rotary_dim odd", "page_size of another pool", "mrope_section of two"]
)
def test_text_is_inside_the_error_of_compile(name, way):
    _, text = error_of(lambda: PLAIN_WAYS["cpu"]("rope_pool_fused", build(BROKEN[name])))
    error = error_of(lambda: WRAPPING_WAYS[way]("rope_pool_fused", build(BROKEN[name])))
    assert error is not None and text in error[1]


@pytest.mark.parametrize("op", OPS)
def test_a_refused_call_writes_nothing(op):
    for changes in BROKEN.values():
        if "device" in changes or "storage_bytes" in changes:
            continue
        sample = build(changes)
        before = sample.clone()
        assert error_of(lambda sample=sample: sample.run(op)) is not None
        for got, want in zip(sample.tensors, before.tensors, strict=True):
            assert_same_bits(got, want)


# One fault a rule, in the order in which they are reported.
ORDER = [
    {"rope_base": 0.0},
    {"rope_base": None},
    {"attention_scaling": math.nan},
    {"rotary_dim": 66},
    {**PAGED, "page_size": 8},
    {"mrope_interleaved": True},
]


def test_the_earlier_of_two_faults_is_reported():
    for i, first in enumerate(ORDER):
        expected = error_of(lambda first=first: build(first).run())
        for second in ORDER[i + 1 :]:
            for device in ("cpu", "meta"):
                both = build({**second, **first}, device)
                assert error_of(lambda both=both: both.run()) == expected, (first, second)


def test_legal():
    """What is just inside the rules is accepted: on the CPU, and by the fake kernel."""
    for changes in (
        {**INV_FREQ, "dtype": torch.float64},
        {**INV_FREQ, "rotary_dim": 64},
        {**INV_FREQ, "inv_freq": (1,), "rotary_dim": 2},
        {"attention_scaling": 3.4e38},
        {**PAGED, "page_size": 16},
        {**PAGED, "k_pool": (0, 16, 2, 64), "v_pool": (0, 16, 2, 64), "page_size": 16, "slots": (0,), "q": (0, 8, 64),
         "k": (0, 2, 64), "v": (0, 2, 64), "positions": (0,)},
        MROPE,
        {**MROPE, "mrope_interleaved": True},
        {**MROPE, "mrope_section": [0, 32, 0]},
        {"q": (4, 8, 65), "k": (4, 2, 65), "v": (4, 2, 65), "k_pool": (128, 2, 65), "v_pool": (128, 2, 65),
         "head_dim": 65, "rotary_dim": 64},
    ):  # fmt: skip
        for device in ("cpu", "meta"):
            build(changes, device).run()


def test_inv_freq_that_requires_grad_is_refused():
    sample = build(INV_FREQ)
    sample.kwargs["inv_freq"].requires_grad_()
    with pytest.raises(RuntimeError, match="inv_freq requires grad: call it under"):
        sample.run()
