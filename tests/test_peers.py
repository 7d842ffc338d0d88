"""The op against what users come from: MLX's rope, and rotary embeddings over a cos/sin cache as in vLLM.

Each peer is run for its definition of the arguments, not its accuracy: the tolerances are the peer's own.
"""

import mlx.core as mx
import numpy as np
import pytest
import torch
from sample import make_sample

MLX_DTYPES = {torch.float32: mx.float32, torch.float16: mx.float16, torch.bfloat16: mx.bfloat16}
# Those of MLX's own rope tests, on inputs in [0, 1). Its angles are float32, so positions stay small here.
MLX_TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def compare_with_mlx(
    shape=(2, 4, 8),
    dims=8,
    traditional=False,
    base=10000.0,
    scale=1.0,
    offset=0,
    freqs=None,
    dtype=torch.float32,
):
    """mx.fast.rope on `[batch, num_tokens, features]` against the op on one head per batch entry."""
    batch, num_tokens, head_dim = shape
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = mx.fast.rope(
        mx.array(x.float().numpy()).astype(MLX_DTYPES[dtype]),
        dims,
        traditional=traditional,
        base=None if freqs is not None else base,
        scale=scale,
        offset=offset,
        freqs=None if freqs is None else mx.array(freqs.numpy()),
    )
    # MLX scales positions and takes wavelengths where we take frequencies.
    inv_freq = (
        base ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
        if freqs is None
        else 1 / freqs.double()
    )
    rotated = (
        make_sample(num_tokens, batch, 1, head_dim, dtype=dtype)
        .with_(
            q=x.transpose(0, 1),
            positions=torch.arange(offset, offset + num_tokens),
            rope_base=None,
            inv_freq=scale * inv_freq,
            rotary_dim=dims,
            interleaved=traditional,
        )
        .run()[0]
    )
    error = (
        (rotated.transpose(0, 1).float() - torch.from_numpy(np.array(expected.astype(mx.float32))))
        .abs()
        .max()
    )
    assert error <= MLX_TOLERANCES[dtype]


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"base": 1000000.0},
        {"dtype": torch.float16},
        {"dtype": torch.bfloat16},
        {"dims": 2},
        {"dims": 4},
        {"scale": 2.0},
        {"scale": 0.5},
        {"offset": 3},
        {"offset": 3, "scale": 2.0},
        {"shape": (1, 1, 8), "offset": 7},
        {"shape": (3, 9, 128), "dims": 128},
        {"shape": (3, 9, 128), "dims": 64},
        {"freqs": torch.tensor([1.0, 10.0, 100.0, 1000.0])},
        {"freqs": torch.tensor([1.5, 2.5, 77.0, 9000.0]), "scale": 0.5, "offset": 5},
    ],
    ids=str,
)
def test_mlx_rope(case, traditional):
    compare_with_mlx(**case, traditional=traditional)


def rotary_embedding(positions, x, rotary_dim, cos_sin_cache, is_neox):
    """A head's first rotary_dim features turned by a row of a cache of cosines, then sines."""
    cos, sin = cos_sin_cache[positions][:, None, :].chunk(2, dim=-1)
    turning, passing = x[..., :rotary_dim], x[..., rotary_dim:]
    if is_neox:
        x1, x2 = turning.chunk(2, dim=-1)
        turned = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)
    else:
        x1, x2 = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).flatten(-2)
    return torch.cat([turned, passing], dim=-1)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("head_dim, rotary_dim", [(64, 64), (128, 128), (80, 32), (96, 24), (256, 64)])
def test_cos_sin_cache(head_dim, rotary_dim, is_neox):
    inv_freq = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(8192, dtype=torch.float64)[:, None] * inv_freq
    cache = torch.cat([angle.cos(), angle.sin()], dim=-1)

    sample = make_sample(33, 4, 2, head_dim, pool_size=64, max_position=8192).with_(
        rotary_dim=rotary_dim, interleaved=not is_neox
    )
    q_rot, k_rot, k_pool, v_pool = sample.run()
    positions, slots = sample.positions.long(), sample.slots.long()
    for x, rotated in ((sample.q, q_rot), (sample.k, k_rot)):
        expected = rotary_embedding(positions, x.double(), rotary_dim, cache, is_neox)
        # sin and cos are off by up to 1e-7, and a pair's sum is below 8; the cache's angles add 1e-12.
        torch.testing.assert_close(rotated.double(), expected, rtol=0, atol=1e-6)
    assert torch.equal(k_pool[slots], k_rot)
    assert torch.equal(v_pool[slots], sample.v)
