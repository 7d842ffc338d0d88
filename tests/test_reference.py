"""The reference against the usual formula and mpmath, since everything else is held against it."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from sample import bits, make_sample

from torch_ropepool import reference


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([-x2, x1], dim=-1)


@pytest.mark.parametrize("head_dim", [2, 64, 80])
def test_it_is_the_rotation_that_models_use(head_dim):
    call = make_sample(head_dim=head_dim, dtype=torch.float64)
    before = call.clone()
    inv_freq = 1.0 / (10000.0 ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim))
    angle = call.positions[:, None, None] * torch.cat([inv_freq, inv_freq])
    q_rot, k_rot, k_pool, v_pool = reference.rope_pool_fused(*call.args, **call.kwargs)
    for got, x in ((q_rot, before.q), (k_rot, before.k)):
        want = x * angle.cos() + rotate_half(x) * angle.sin()
        # Angles up to 4096 have an error of 4096 * 2^-53 in either factor and in inv_freq.
        torch.testing.assert_close(got, want, rtol=0, atol=5e-12)
    assert k_pool is call.k_pool
    assert v_pool is call.v_pool
    assert torch.equal(k_pool[call.slots], k_rot)
    assert torch.equal(v_pool[call.slots], before.v)


@pytest.mark.parametrize("rope_base", [10000.0, 0.3])
def test_cos_and_sin_at_any_position(rope_base):
    positions = [0, 1, -1, 131071, 2**31 - 1, -(2**31), 2**40 + 1, -(2**62), 2**63 - 1, -(2**63)]
    cos, sin = reference.cos_sin(torch.tensor(positions), 16, rope_base=rope_base)
    with mpmath.workprec(320):
        for row, position in enumerate(positions):
            # The rounding of the frequency to 2^-96 turn; then of the phase, the angle and the result.
            tolerance = abs(position) * 2.0**-96 * 2 * math.pi + 1e-15
            for i in range(8):
                c, s = mpmath.cos_sin(position * mpmath.mpf(rope_base) ** (mpmath.mpf(-2 * i) / 16))
                assert abs(cos[row, i].item() - c) < tolerance
                assert abs(sin[row, i].item() - s) < tolerance


def test_slots_negative_and_repeated():
    call = make_sample(4)
    before = call.clone()
    call = call.with_(slots=torch.tensor([5, -1, 2, 5]))
    _, k_rot, k_pool, v_pool = reference.rope_pool_fused(*call.args, **call.kwargs)
    want_k, want_v = before.k_pool.clone(), before.v_pool.clone()
    want_k[2], want_k[5] = k_rot[2], k_rot[3]
    want_v[2], want_v[5] = before.v[2], before.v[3]
    assert torch.equal(bits(k_pool), bits(want_k))
    assert torch.equal(bits(v_pool), bits(want_v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_it_computes_in_float64_whatever_the_dtype(dtype):
    call = make_sample(dtype=dtype)
    cos, sin = reference.cos_sin(call.positions, 64, rope_base=10000.0)
    exact = reference.rotate(call.q.double(), cos, sin)
    got = reference.rotate(call.q, cos, sin)
    assert got.dtype == dtype
    assert torch.equal(got, exact.to(dtype))
