"""PyTorch's own checks of a custom op: schema, fake kernel, autograd, functionalization."""

from __future__ import annotations

import pytest
import torch
from sample import OPS, Sample, make_sample

UTILITIES = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)
SIZES = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 8, "pool_size": 16}


def packed_qkv(sample: Sample) -> Sample:
    """q, k and v as column slices of one projection."""
    num_tokens = len(sample.q)
    qkv = torch.cat([sample.q, sample.k, sample.v], dim=1)
    q, k, v = qkv.view(num_tokens, 8, 8).split([4, 2, 2], dim=1)
    return sample.with_(q=q, k=k, v=v)


def pools_of_one_buffer(sample: Sample) -> Sample:
    """Layer 1 of a [layers, 2, pool, heads, dim] buffer."""
    buffer = torch.stack([torch.stack([sample.k_pool, sample.v_pool])] * 2)
    return sample.with_(k_pool=buffer[1, 0], v_pool=buffer[1, 1])


def heads_first(sample: Sample) -> Sample:
    """Every tensor as the transpose of one whose heads come first."""

    def transposed(t: torch.Tensor) -> torch.Tensor:
        return t if t.dim() == 1 else t.transpose(0, 1).contiguous().transpose(0, 1)

    return sample.map(transposed)


SAMPLES = {
    "float32": make_sample(7, **SIZES),
    "float16": make_sample(7, **SIZES, dtype=torch.float16),
    "bfloat16, int64": make_sample(7, **SIZES, dtype=torch.bfloat16, index_dtype=torch.int64),
    "float64, one token": make_sample(1, **SIZES, dtype=torch.float64),
    "one token, int64": make_sample(1, **SIZES, index_dtype=torch.int64),
    "no token": make_sample(0, **SIZES),
    "packed qkv": packed_qkv(make_sample(7, **SIZES)),
    "packed qkv, one token": packed_qkv(make_sample(1, **SIZES)),
    "pools of one buffer": pools_of_one_buffer(make_sample(7, **SIZES, dtype=torch.bfloat16)),
    "heads first": heads_first(make_sample(7, **SIZES)),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name: str, op: str) -> None:
    sample = SAMPLES[name]
    result = torch.library.opcheck(OPS[op].default, sample.args, sample.kwargs, test_utils=UTILITIES)
    assert result == dict.fromkeys(UTILITIES, "SUCCESS")
