"""Decode steps of a whole model in one compiled graph: no copy of a pool, few compilations, eager's bits."""

from __future__ import annotations

import ast
import ctypes
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checks import assert_same_bits, largest_allocation
from sample import OPS
from torch import Tensor
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code

# SmolLM2-135M
HIDDEN_SIZE, NUM_LAYERS = 576, 30
NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 9, 3, 64
POOL_SIZE = 2**30 // (NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * 4)  # 1 GB in all, float32

CLEAR_REFS = Path("/proc/self/clear_refs")


@pytest.fixture(scope="module", autouse=True)
def fresh_compiler(tmp_path_factory) -> Iterator[None]:
    """Inductor's caches do not see a change of a composite or of a fake kernel."""
    with fresh_inductor_cache(dir=str(tmp_path_factory.mktemp("inductor"))):
        yield


@pytest.fixture(autouse=True)
def counted_from_zero() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class Decoder(torch.nn.Module):
    """Attention layers. `pools` is one buffer [layers, 2, pool_size, heads, dim], or k and v of each layer."""

    def __init__(self, num_layers: int, op: str = "rope_pool_fused", *, stacked: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        qkv_size = (NUM_QO_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
        self.qkv = torch.nn.ModuleList(
            torch.nn.Linear(HIDDEN_SIZE, qkv_size, bias=False) for _ in range(num_layers)
        )
        self.out = torch.nn.ModuleList(
            torch.nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE, bias=False) for _ in range(num_layers)
        )
        self.requires_grad_(False)
        self.op, self.stacked = OPS[op], stacked

    def split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """q, k and v as slices of a projection: of each token's heads, or one after the other."""
        if not self.stacked:
            heads = qkv.unflatten(1, (-1, HEAD_DIM))
            return heads.split([NUM_QO_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        rows, n = qkv.view(-1, NUM_KV_HEADS, HEAD_DIM), qkv.shape[0]
        return rows[2 * n :].view(n, NUM_QO_HEADS, HEAD_DIM), rows[:n], rows[n : 2 * n]

    def forward(self, x, positions, slots, mask, pools):
        for i in range(len(self.qkv)):
            k_pool, v_pool = pools[i] if isinstance(pools, Tensor) else pools[2 * i : 2 * i + 2]
            q, k, v = self.split(self.qkv[i](x))
            result = self.op(
                q,
                k,
                v,
                positions,
                slots,
                k_pool,
                v_pool,
                head_dim=HEAD_DIM,
                num_qo_heads=NUM_QO_HEADS,
                num_kv_heads=NUM_KV_HEADS,
                rope_base=100000.0,
            )
            if result is not None:
                q, _, k_pool, v_pool = result
            attended = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                k_pool[: mask.shape[1]].transpose(0, 1)[None],
                v_pool[: mask.shape[1]].transpose(0, 1)[None],
                attn_mask=mask,
                enable_gqa=True,
            )
            # Not a bare sum, which Inductor makes part of the product, rounding otherwise.
            x = x + self.out[i](attended[0].transpose(0, 1).flatten(1)).relu()
        return x


def make_step(num_tokens: int, context_length: int, pool_size: int, seed: int = 0) -> tuple[Tensor, ...]:
    """x, positions, slots, and a mask over the first rows of the pools."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num_tokens, HIDDEN_SIZE, generator=generator),
        torch.arange(num_tokens) + context_length,
        torch.randperm(min(context_length, pool_size), generator=generator)[:num_tokens],
        torch.zeros(num_tokens, context_length),
    )


def make_pools(num_layers: int, pool_size: int, *, one_buffer: bool) -> Tensor | list[Tensor]:
    """Every pool full of a number of its own, so that its memory is there and a wrong pool shows."""
    numbers = torch.arange(num_layers * 2).view(num_layers, 2, 1, 1, 1) / 64
    shape = (pool_size, NUM_KV_HEADS, HEAD_DIM)
    if one_buffer:
        return numbers.expand(num_layers, 2, *shape).clone()
    return [number.expand(shape).clone() for number in numbers.flatten(0, 1)]


def copied(pools: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    return pools.clone() if isinstance(pools, Tensor) else [pool.clone() for pool in pools]


def assert_same_pools(got: Tensor | list[Tensor], want: Tensor | list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


# ---- Memory


def pools_written(code: str) -> list[str]:
    """What a graph's generated Python passes to the ops as k_pool and v_pool."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    ops = [call for call in calls if "ropepool" in ast.unparse(call.func)]
    return [ast.unparse(pool) for call in ops for pool in call.args[5:7]]


def resident_bytes(name: str) -> int:
    """VmRSS or VmHWM of this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def peak_growth(function: Callable[[], object]) -> int:
    """By how much the process's memory is larger meanwhile than before."""
    ctypes.CDLL(None).malloc_trim(0)  # what is free but resident would hide an allocation
    CLEAR_REFS.write_text("5")  # sets VmHWM to VmRSS
    before = resident_bytes("VmRSS")
    function()
    return resident_bytes("VmHWM") - before


@pytest.mark.parametrize("one_buffer", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@torch.no_grad()
def test_thirty_layers_copy_no_pool(dynamic, one_buffer):
    model = Decoder(NUM_LAYERS)
    step = make_step(16, 48, POOL_SIZE)
    pools = make_pools(NUM_LAYERS, POOL_SIZE, one_buffer=one_buffer)
    want_pools = copied(pools)
    want = model(*step, want_pools)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    got, (code,) = run_and_get_code(compiled, *step, pools)
    assert_same_bits(got, want)
    assert_same_pools(pools, want_pools)
    del want_pools
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1

    written = pools_written(code)
    assert len(set(written)) == NUM_LAYERS * 2
    assert all(pool.startswith(("arg", "reinterpret_tensor(arg")) for pool in written)

    pool_bytes = POOL_SIZE * NUM_KV_HEADS * HEAD_DIM * 4
    a_pool = pools[0][0] if one_buffer else pools[0]
    largest = largest_allocation(lambda: compiled(*step, pools))
    assert step[0].nbytes <= largest < pool_bytes / 4
    assert largest_allocation(lambda: (compiled(*step, pools), a_pool.clone())) >= pool_bytes
    if CLEAR_REFS.exists():
        widths = HIDDEN_SIZE * 3 + (2 * NUM_QO_HEADS + 3 * NUM_KV_HEADS) * HEAD_DIM
        activations = NUM_LAYERS * len(step[0]) * widths * 4
        assert peak_growth(lambda: compiled(*step, pools)) < activations < pool_bytes
        # It would show. (Where memory is short, the kernel may take pages of libraries back meanwhile.)
        copies = (peak_growth(lambda: (compiled(*step, pools), a_pool.clone())) for _ in range(10))
        assert any(growth > pool_bytes / 2 for growth in copies)


# ---- Compilations


@pytest.mark.parametrize("op", ["rope_pool_fused", "rope_pool_fused_"])
@pytest.mark.parametrize(
    "stacked, dynamic, compilations", [(False, True, 2), (True, True, 2), (True, None, 3)]
)
@torch.no_grad()
def test_compilations_over_200_decode_steps(op, stacked, dynamic, compilations):
    """The batch changes at random, the sequences grow. With `stacked`, q's offset in the projection depends
    on the batch. One token has a graph of its own, all other counts share one; without dynamic=True, torch
    has first made one for the sizes that it saw first.
    """
    num_layers, pool_size = 2, 512
    model = Decoder(num_layers, op, stacked=stacked)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    got, want = (make_pools(num_layers, pool_size, one_buffer=False) for _ in range(2))
    pick = random.Random(0)
    for i in range(200):
        num_tokens = [13, 5][i] if i < 2 else pick.choice([1, 1, 2, 3, 5, 8, 13, 40])
        step = make_step(num_tokens, 48 + i, pool_size, seed=i)
        assert_same_bits(compiled(*step, got), model(*step, want))
    assert_same_pools(got, want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compilations
