"""The CUDA backend on a GPU. Without one this file is not collected: the kernel's body then runs on the
Metal emulator (test_rope_pool_mps.py), and test_cuda_library.py looks at what nvcc makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_ropepool import selftest
from torch_ropepool.selftest import make_case, place, results, same_bits

OPS = selftest.OPS
DTYPES = selftest.DTYPES


def on_gpu(**changes: Any) -> dict[str, Any]:
    return place(make_case("", **changes), "cuda").args


@pytest.mark.parametrize("row", selftest.check_device("cuda"), ids=lambda row: row.kind)
def test_selftest(row):
    assert row.count > 0
    assert not row.failures


def test_tokens_with_one_slot_spoil_no_other_row():
    slots = torch.randint(0, 20, (500,), generator=torch.Generator().manual_seed(0))
    for dtype in DTYPES:
        case = make_case("", num_tokens=500, pool_size=40, slots=slots, dtype=dtype)
        got = results(case, "rope_pool_fused", "cuda")
        rows = {"k_pool": got["k_rot"], "v_pool": case.args["v"]}
        for name, row in rows.items():
            before = case.args[name]
            for slot, stored in enumerate(got[name].view(before.shape)):
                tokens = (slots == slot).nonzero().flatten()
                candidates = row[tokens] if len(tokens) else before[slot][None]
                assert (stored == candidates).any(dim=0).all()


def test_the_later_token_of_a_slot_stays_where_determinism_is_asked():
    assert selftest.repeated_slots("cuda") is None


def test_pools_and_strides_beyond_2_to_32_elements():
    row, rows = 128, 2**25 + 8
    slots = torch.tensor([rows - 1, 2**25, 2**25 - 1, 0, 5])
    args = on_gpu(num_kv_heads=1, head_dim=row, slots=slots)
    pools = {
        name: torch.ones(rows, 1, row, dtype=torch.bfloat16, device="cuda") for name in ("k_pool", "v_pool")
    }
    q = torch.zeros(5, 2**30, dtype=torch.bfloat16, device="cuda")[:, : 4 * row].view(5, 4, row)
    q_rot, k_rot = torch.ops.ropepool._rope_pool_fused(**{**args, **pools, "q": q.copy_(args["q"])})
    small = make_case("", num_kv_heads=1, head_dim=row)
    want = results(small, "_rope_pool_fused", "cpu")
    assert same_bits(q_rot.cpu(), want["q_rot"])
    for pool, stored in ((pools["k_pool"], k_rot), (pools["v_pool"], args["v"])):
        assert same_bits(pool[slots.cuda()].cpu(), stored.cpu())
        untouched = torch.ones(rows, dtype=torch.bool, device="cuda")
        untouched[slots.cuda()] = False
        assert (pool[untouched] == 1).all()


# ---- Streams and graphs


@pytest.mark.parametrize("op", OPS)
def test_no_synchronization(op):
    args = on_gpu()
    selftest.call_op(op, args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            selftest.call_op(op, args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_runs_on_the_current_stream():
    """A long kernel holds the stream; the op must wait for it, and nothing else."""
    case = make_case("", num_tokens=64, pool_size=64)
    want = results(case, "rope_pool_fused", "cuda")
    args = place(case, "cuda").args
    q = args["q"].clone()
    args["q"].zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        args["q"].copy_(q)
        q_rot = torch.ops.ropepool.rope_pool_fused(**args)[0]
    stream.synchronize()
    assert same_bits(q_rot.cpu(), want["q_rot"])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("rope_base", [10000.0, 12345.0], ids=["known base", "base first met in the capture"])
def test_graph_replays_read_new_slots_and_positions(op, rope_base):
    rope_base += OPS.index(op) if rope_base != 10000.0 else 0
    first, second = (
        make_case("", num_tokens=9, rope_base=rope_base, positions=torch.arange(9) * 31 + start, slots=slots)
        for start, slots in ((5, torch.arange(9)), (2**33, torch.arange(20, 11, -1)))
    )
    placed = place(first, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        returned = selftest.call_op(op, placed.args)
    for case in (first, second):
        fresh = place(case, "cuda")
        for name, storage in placed.storages.items():
            storage.copy_(fresh.storages[name])
        graph.replay()
        torch.cuda.synchronize()
        want = results(case, op, "cpu")
        got = dict(placed.storages)
        if op != "rope_pool_fused_":
            got["q_rot"], got["k_rot"] = returned[:2]
        for name in want:
            assert same_bits(got[name].cpu(), want[name])


def test_more_bases_than_are_kept():
    """The last of them is not kept: its table is made for the call."""
    case = make_case("", num_tokens=2, num_qo_heads=1, num_kv_heads=1, head_dim=4)
    for i in range(1100):
        args = place(case, "cuda").args
        args["rope_base"] = 2.0 + i
        torch.ops.ropepool.rope_pool_fused(**args)
    case.args["rope_base"] = 2.0 + i
    assert selftest.difference(case, "rope_pool_fused", "cuda") is None


# ---- Compiled and exported

Function = Callable[..., tuple[torch.Tensor, ...]]


class Step(torch.nn.Module):
    """A call between other ops, whose pool is read after it."""

    def forward(self, q, k, v, positions, slots, k_pool, v_pool):
        q_rot, k_rot, k_pool, v_pool = torch.ops.ropepool.rope_pool_fused(
            q * 2, k, v, positions, slots, k_pool, v_pool,
            head_dim=64, num_qo_heads=4, num_kv_heads=2, rope_base=10000.0,
        )  # fmt: skip
        return q_rot + 1, k_rot, k_pool[slots], v_pool[slots]


def steps() -> list[tuple[torch.Tensor, ...]]:
    """Arguments of Step for several token counts."""
    calls = []
    for num_tokens in (3, 8, 5, 1):
        args = place(make_case("", num_tokens=num_tokens, index_dtype=torch.int64), "cuda").args
        calls.append(tuple(args[name] for name in selftest.TENSORS[:7]))
    return calls


def assert_as_eager(step: Function) -> None:
    for args in steps():
        mine, theirs = (tuple(t.clone() for t in args) for _ in range(2))
        got, want = step(*mine), Step()(*theirs)
        for a, b in zip((*got, *mine), (*want, *theirs), strict=True):
            assert same_bits(a.cpu(), b.cpu())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_compile(mode, dynamic):
    torch._dynamo.reset()
    with torch.no_grad():
        assert_as_eager(torch.compile(Step(), fullgraph=True, mode=mode, dynamic=dynamic))


def exported() -> torch.export.ExportedProgram:
    num_tokens = torch.export.Dim("num_tokens")
    shapes = {
        name: {0: num_tokens} if name[:2] not in ("k_", "v_") else None for name in selftest.TENSORS[:7]
    }
    return torch.export.export(Step(), steps()[0], dynamic_shapes=shapes)


def test_export():
    with torch.no_grad():
        assert_as_eager(exported().module())


PACKAGE = """
import sys, torch
module, inputs = torch.nn.SiLU(), (torch.randn(3, 4, device="cuda"),)
with torch.no_grad():
    program = torch.export.export(module, inputs)
    path = torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
    torch._inductor.aoti_load_package(path)(*inputs)
"""


def test_aot_inductor(tmp_path):
    command = [sys.executable, "-c", PACKAGE, str(tmp_path / "silu.pt2")]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("this torch cannot load an AOTInductor package of torch.nn.SiLU either")
    with torch.no_grad():
        path = torch._inductor.aoti_compile_and_package(exported(), package_path=str(tmp_path / "step.pt2"))
        assert_as_eager(torch._inductor.aoti_load_package(path))


# ---- The debug switch


def test_slots_are_checked_where_asked():
    code = """
import torch
from torch_ropepool.selftest import make_case, place
args = place(make_case("", slots=torch.tensor([1, 2, 32, 3, -1])), "cuda").args
before = args["k_pool"].clone()
try:
    torch.ops.ropepool.rope_pool_fused(**args)
except IndexError as error:
    print(error)
print(torch.equal(args["k_pool"], before))
"""
    text = "slots[2] is 32, out of range for pool_size 32; a negative slot means: do not store\n"
    for value, said in (("1", text + "True\n"), ("0", "False\n")):
        environment = {**os.environ, "TORCH_ROPEPOOL_CHECK_SLOTS": value}
        result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert (result.returncode, result.stdout) == (0, said), result.stderr
