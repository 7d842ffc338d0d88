"""A call of any op against the reference in float64, with the bounds that are promised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from sample import Sample, bits, spacing
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.torch_version import TorchVersion

from torch_ropepool import reference

TORCH = TorchVersion(torch.__version__)  # compares as versions do
HALF_DTYPES = (torch.float16, torch.bfloat16)
ANGLE_KWARGS = ("rope_base", "inv_freq", "attention_scaling", "mrope_section", "mrope_interleaved")


@contextmanager
def threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def largest_allocation(function: Callable[[], object]) -> int:
    """Bytes of the largest single CPU allocation meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    # Not profiled.events(): those of a compiled region are one event, less what it frees.
    events = profiled.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert torch.equal(bits(got), bits(want))


def rotary_dim(call: Sample) -> int:
    return call.kwargs.get("rotary_dim") or call.kwargs["head_dim"]


def rotated(x: Tensor, call: Sample) -> Tensor:
    """What `x` is turned to, in float64."""
    angle_kwargs = {name: call.kwargs[name] for name in ANGLE_KWARGS if name in call.kwargs}
    cos, sin = reference.cos_sin(call.positions, rotary_dim(call), **angle_kwargs)
    return reference.rotate(x.double(), cos, sin, call.kwargs.get("interleaved", False))


def pair_sums(x: Tensor, call: Sample) -> Tensor:
    """|x1| + |x2| of each feature's pair, float64; 0 where features do not turn."""
    sums = torch.zeros_like(x, dtype=torch.float64)
    turning, out = x[..., : rotary_dim(call)].double().abs(), sums[..., : rotary_dim(call)]
    if call.kwargs.get("interleaved"):
        out[..., ::2] = out[..., 1::2] = turning[..., ::2] + turning[..., 1::2]
    else:
        first, second = turning.chunk(2, dim=-1)
        out.copy_(torch.cat([first + second, first + second], dim=-1))
    return sums


def assert_rotated(got: Tensor, x: Tensor, call: Sample) -> None:
    """`got` is `x`, turned as `call` says; features that do not turn have the same bits."""
    turned = slice(rotary_dim(call))
    number, exact = got[..., turned].double(), rotated(x, call)[..., turned]
    # float32: sin and cos 9e-8, roundings of the product and of the fma 6e-8 each: 4e-7 is promised.
    # A scaling of cos and sin rounds once more, and so does the scaling itself to float32.
    # float64: sin and cos four units of 2^-53, the reference's own as much again.
    scaling = abs(call.kwargs.get("attention_scaling", 1.0))
    relative = 2e-15 if x.dtype == torch.float64 else 4e-7
    tolerance = relative * scaling * pair_sums(x, call)[..., turned]
    if x.dtype != torch.float64:
        tolerance += 2.0**-149  # two half steps, where float32's numbers are subnormal
    if x.dtype in HALF_DTYPES:
        tolerance += spacing(exact, x.dtype) / 2  # the rounding to the output
    largest = torch.finfo(x.dtype).max
    beyond = (exact.abs() > largest) & (number == exact.sign() * torch.inf)
    assert (((number - exact).abs() <= tolerance) | beyond).all()
    assert_same_bits(got[..., rotary_dim(call) :], x[..., rotary_dim(call) :])


def stored(before: Sample, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Bits of the two pools after a call that gave `k_rot`: token after token, the last one stays."""
    k_pool, v_pool = bits(before.k_pool).clone(), bits(before.v_pool).clone()
    page_size = before.kwargs.get("page_size")
    for token, slot in enumerate(before.slots.tolist()):
        if slot >= 0:
            row = slot if page_size is None else divmod(slot, page_size)
            k_pool[row] = bits(k_rot[token])
            v_pool[row] = bits(before.v[token])
    return k_pool, v_pool


def check(call: Sample, op: str = "rope_pool_fused", num_threads: int = 1) -> None:
    """Runs the op: outputs against the reference, pools and all that must not change bit for bit."""
    before = call.clone()
    with threads(num_threads):
        q_rot, k_rot, k_pool, v_pool = call.run(op)
    assert q_rot.dtype == k_rot.dtype == before.q.dtype
    assert_rotated(q_rot, before.q, before)
    assert_rotated(k_rot, before.k, before)
    for pool, want in zip((k_pool, v_pool), stored(before, k_rot), strict=True):
        assert torch.equal(bits(pool), want)
    in_place = op == "rope_pool_fused_"
    for name in ("v", "positions", "slots") if in_place else ("q", "k", "v", "positions", "slots"):
        assert_same_bits(getattr(call, name), getattr(before, name))
