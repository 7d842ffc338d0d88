"""The op on heads sharded over two processes: examples/tensor_parallel.py and what can go wrong in it.

Two processes run every check of CHECKS in turn and save what they found; the tests judge it here, where one
process has run the op on the whole tensors.
"""

from __future__ import annotations

import torch_ropepool  # noqa: F401  (registers the ops: a spawned process has no conftest that does)

# isort: split
import contextlib
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from checks import assert_same_bits
from sample import Sample, make_sample
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import local_map

from torch_ropepool import rope_pool_fused, rope_pool_fused_

EXAMPLES = Path(__file__).parents[1] / "examples"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(EXAMPLES)
    import tensor_parallel as example

NUM_PROCESSES = 2
SECONDS = 100  # for a hang to fail; 20 on two busy cores
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MODES = (torch.enable_grad, torch.inference_mode)  # besides no_grad
HEADS, TOKENS, WHOLE = [Shard(1)], [Shard(0)], [Replicate()]
SHARDED = ("q", "k", "v", "k_pool", "v_pool")


def whole_call(dtype: torch.dtype = torch.float32, num_kv_heads: int = 2) -> Sample:
    """Two query heads for each KV head, pools that are not zero, a token that is not stored."""
    call = make_sample(num_qo_heads=2 * num_kv_heads, num_kv_heads=num_kv_heads, dtype=dtype)
    call.slots[3] = -1
    return call


# ---- In each of the two processes


def shape_of(call: Sample) -> example.Shape:
    return example.Shape(**call.kwargs)


def shard(call: Sample, mesh: DeviceMesh, placements: list[Any] = HEADS) -> tuple[Tensor, ...]:
    shards = {name: distribute_tensor(getattr(call, name), mesh, placements) for name in SHARDED}
    return call.with_(**shards).args


def local(*tensors: Tensor) -> list[Tensor]:
    return [t.to_local().clone() for t in tensors]


def sharded_op(mesh: DeviceMesh, call: Sample) -> Callable[..., Any]:
    return example.sharded_rope_pool(mesh, example.shape_per_process(shape_of(call), mesh.size()))


def error_of(function: Callable[..., Any], *args: Any) -> tuple[str, str] | None:
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def refused(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """The error of a call, and whether it left the pools alone."""
    pools = local(*args[-2:])
    error = error_of(function, *args)
    unchanged = all(torch.equal(a, b) for a, b in zip(local(*args[-2:]), pools, strict=True))
    return {"error": error, "unchanged": unchanged}


def run_op(mesh: DeviceMesh, dtype: torch.dtype, mode: Callable[..., Any]) -> dict[str, Any]:
    call = whole_call(dtype)
    args = shard(call, mesh)
    with mode():
        result = sharded_op(mesh, call)(*args)
    in_place = [
        out.to_local().data_ptr() == pool.to_local().data_ptr()
        for out, pool in zip(result[2:], args[-2:], strict=True)
    ]
    shapes = [t.shape for t in result]
    return {"result": local(*result), "pools": local(*args[-2:]), "in_place": in_place, "shapes": shapes}


def run_in_place_op(mesh: DeviceMesh) -> list[Tensor]:
    call = whole_call()
    q, k, *rest = shard(call, mesh)
    shape = example.shape_per_process(shape_of(call), mesh.size())
    op = local_map(partial(rope_pool_fused_, **shape._asdict()), (None,), device_mesh=mesh)
    op(q, k, *rest)
    return local(q, k, *rest[-2:])


def count_collectives(mesh: DeviceMesh) -> dict[str, Any]:
    call = whole_call()
    args = shard(call, mesh)
    with CommDebugMode() as in_op:
        result = sharded_op(mesh, call)(*args)
    redistributing = local_map(lambda q: q, HEADS, in_placements=(WHOLE,), redistribute_inputs=True)
    with CommDebugMode() as in_control:
        redistributing(args[0])
    return {
        "result": local(*result),
        "op": in_op.get_total_counts(),
        "control": in_control.get_total_counts(),
    }


def pass_global_counts(mesh: DeviceMesh) -> dict[str, Any]:
    call = whole_call()
    return refused(example.sharded_rope_pool(mesh, shape_of(call)), *shard(call, mesh))


def pass_global_kv_count(mesh: DeviceMesh) -> dict[str, Any]:
    call = whole_call()
    shape = shape_of(call)._replace(num_qo_heads=2)
    return refused(example.sharded_rope_pool(mesh, shape), *shard(call, mesh))


def uneven_heads(mesh: DeviceMesh) -> dict[str, Any]:
    call = whole_call(num_kv_heads=3)
    rounded = shape_of(call)._replace(num_qo_heads=3, num_kv_heads=1)
    return {
        "shape": error_of(example.shape_per_process, shape_of(call), mesh.size()),
        "op": refused(example.sharded_rope_pool(mesh, rounded), *shard(call, mesh)),
    }


def wrong_placement(mesh: DeviceMesh, placements: list[Any]) -> dict[str, Any]:
    call = whole_call()
    return refused(sharded_op(mesh, call), *shard(call, mesh, placements))


def call_on_dtensors(mesh: DeviceMesh) -> dict[str, Any]:
    """The op itself on DTensors, without local_map."""
    call = whole_call()
    whole = {name: distribute_tensor(getattr(call, name), mesh, WHOLE) for name in ("positions", "slots")}
    sharded = Sample(*shard(call, mesh)).with_(**whole)
    return refused(partial(rope_pool_fused, **call.kwargs), *sharded.args)


def weights_that_require_grad(mesh: DeviceMesh) -> dict[str, Any]:
    call = whole_call()
    args = shard(call, mesh)
    args[0].requires_grad_()
    op = sharded_op(mesh, call)
    found = {"grad": refused(op, *args)}
    with torch.no_grad():
        found["no_grad"] = local(*op(*args))
    return found


def run_layer(mesh: DeviceMesh, compile_layer: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Two steps of the example's layer, and the collectives of the second one."""
    shape = example.shape_per_process(example.SHAPE, mesh.size())
    layer = partial(
        example.attention_layer,
        rope_pool=example.sharded_rope_pool(mesh, shape),
        attend=example.sharded_attend(mesh),
    )
    if compile_layer is not None:
        layer = compile_layer(layer)
    weights, steps = example.make_inputs()
    weights = example.shard_weights(weights, mesh)
    pool_shape = (example.POOL_SIZE, example.SHAPE.num_kv_heads, example.SHAPE.head_dim)
    pools = [example.zeros(pool_shape, device_mesh=mesh, placements=HEADS) for _ in "kv"]
    rotated = []
    with torch.no_grad():
        for step in steps[:2]:
            with CommDebugMode() if compile_layer is None else contextlib.nullcontext() as comm:
                q_rot, k_rot, _ = layer(weights, example.replicate_x(step, mesh), *pools)
            rotated += local(q_rot, k_rot)
    counts = {} if comm is None else {str(op): n for op, n in comm.get_comm_counts().items()}
    return {"rotated": rotated, "pools": local(*pools), "counts": counts}


def run_compiled_layer(mesh: DeviceMesh) -> dict[str, Any]:
    graphs: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    backend = aot_autograd(fw_compiler=keep)  # what aot_eager is, with the graph kept
    found = run_layer(mesh, partial(torch.compile, backend=backend, fullgraph=True))
    return {**found, "graphs": graphs}


def pass_global_counts_compiled(mesh: DeviceMesh) -> dict[str, Any]:
    call = whole_call()
    op = torch.compile(example.sharded_rope_pool(mesh, shape_of(call)), backend="aot_eager", fullgraph=True)
    return refused(op, *shard(call, mesh))


# Errors come from the op before any collective: a process that fails leaves no other waiting.
CHECKS: dict[str, Callable[[DeviceMesh], Any]] = {
    **{str(dtype): partial(run_op, dtype=dtype, mode=torch.no_grad) for dtype in DTYPES},
    **{mode.__name__: partial(run_op, dtype=torch.float32, mode=mode) for mode in MODES},
    "in_place": run_in_place_op,
    "collectives": count_collectives,
    "global_counts": pass_global_counts,
    "global_kv_count": pass_global_kv_count,
    "uneven": uneven_heads,
    "whole": partial(wrong_placement, placements=WHOLE),
    "tokens": partial(wrong_placement, placements=TOKENS),
    "dtensors": call_on_dtensors,
    "requires_grad": weights_that_require_grad,
    "layer": run_layer,
    "compiled_layer": run_compiled_layer,
    "global_counts_compiled": pass_global_counts_compiled,
}


def run_checks(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with example.process_group(rank, NUM_PROCESSES, folder / "rendezvous") as mesh:
        for name, check in CHECKS.items():
            try:
                found[name] = check(mesh)
            except Exception:
                found[name] = traceback.format_exc()
    torch.save(found, folder / f"{rank}.pt")


# ---- Here


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process found, by the check's name."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    context = mp.spawn(run_checks, (folder,), nprocs=NUM_PROCESSES, join=False)
    deadline = time.monotonic() + SECONDS
    while not context.join(max(0.1, deadline - time.monotonic())):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
                process.join()
            pytest.fail(f"the two processes had not finished after {SECONDS} s")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(NUM_PROCESSES)]


def of_both(found: list[dict[str, Any]], check: str) -> list[Any]:
    results = [of_one[check] for of_one in found]
    for rank, result in enumerate(results):
        assert not isinstance(result, str), f"process {rank}:\n{result}"
    return results


def assert_shards_of(shards: list[list[Tensor]], whole: tuple[Tensor, ...]) -> None:
    """Each process has its half of the heads of every tensor, bit for bit."""
    for rank, tensors in enumerate(shards):
        for got, want in zip(tensors, whole, strict=True):
            assert_same_bits(got, want.chunk(NUM_PROCESSES, dim=1)[rank])


@pytest.mark.parametrize(
    "check, dtype",
    [*((str(dtype), dtype) for dtype in DTYPES), *((mode.__name__, torch.float32) for mode in MODES)],
)
def test_same_bits_as_one_process(found, check, dtype):
    """Outputs and all rows of the pools, under no_grad and the other modes; nothing requires grad here."""
    results = of_both(found, check)
    call = whole_call(dtype)
    before = call.clone()
    whole = call.run()
    assert not torch.equal(call.k_pool, before.k_pool)
    assert_shards_of([r["result"] for r in results], whole)
    assert_shards_of([r["pools"] for r in results], whole[2:])
    for result in results:
        assert result["in_place"] == [True, True]
        assert result["shapes"] == [t.shape for t in whole]


def test_in_place_form(found):
    call = whole_call()
    assert_shards_of(of_both(found, "in_place"), call.run("rope_pool_fused_"))


def test_no_collectives_in_the_op(found):
    """The control redistributes its input, which shows that the count sees what local_map does."""
    for result in of_both(found, "collectives"):
        assert result["op"] == 0
        assert result["control"] == 1
    assert_shards_of([r["result"] for r in of_both(found, "collectives")], whole_call().run())


def test_global_head_counts(found):
    for result in of_both(found, "global_counts"):
        text = "q shape must be [num_tokens, num_qo_heads, head_dim], got [7, 2, 64] with num_qo_heads 4, head_dim 64"
        assert result == {"error": ("ValueError", text), "unchanged": True}
    for result in of_both(found, "global_kv_count"):
        text = "k shape must be [num_tokens, num_kv_heads, head_dim], got [7, 1, 64] with num_tokens 7, num_kv_heads 2, head_dim 64"
        assert result == {"error": ("ValueError", text), "unchanged": True}


def test_heads_that_do_not_divide(found):
    """3 KV heads are 2 and 1: the op refuses the process whose count is wrong, the example every one."""
    first, second = of_both(found, "uneven")
    text = "num_kv_heads must be a multiple of the 2 processes, got 3"
    assert first["shape"] == second["shape"] == ("ValueError", text)
    text = "k shape must be [num_tokens, num_kv_heads, head_dim], got [7, 2, 64] with num_tokens 7, num_kv_heads 1, head_dim 64"
    assert first["op"] == {"error": ("ValueError", text), "unchanged": True}
    assert second["op"]["error"] is None


@pytest.mark.parametrize("placement", ["whole", "tokens"])
def test_other_placements(found, placement):
    """local_map refuses them: it does not redistribute behind one's back."""
    for result in of_both(found, placement):
        assert result["error"] is not None
        name, text = result["error"]
        assert name == "ValueError"
        assert "in local_map has a mismatched placements" in text
        assert result["unchanged"]


def test_op_on_dtensors_is_refused(found):
    """When this fails, DTensor has found a way of its own to run the op: see whether it is right."""
    for result in of_both(found, "dtensors"):
        name, text = result["error"]
        assert name == "NotImplementedError"
        assert "does not have a sharding strategy registered" in text
        assert result["unchanged"]


def test_requires_grad(found):
    results = of_both(found, "requires_grad")
    for result in results:
        name, text = result["grad"]["error"]
        assert name == "RuntimeError"
        assert "rope_pool_fused has no backward, but q requires grad" in text
        assert result["grad"]["unchanged"]
    assert_shards_of([r["no_grad"] for r in results], whole_call().run())


def layer_in_one_process() -> tuple[tuple[Tensor, ...], list[Tensor]]:
    weights, steps = example.make_inputs()
    pools = [torch.zeros(example.POOL_SIZE, example.SHAPE.num_kv_heads, example.SHAPE.head_dim) for _ in "kv"]
    rotated = [t for step in steps[:2] for t in example.attention_layer(weights, step, *pools)[:2]]
    return tuple(rotated), pools


@pytest.mark.parametrize("check", ["layer", "compiled_layer"])
def test_layer(found, check):
    results = of_both(found, check)
    rotated, pools = layer_in_one_process()
    assert_shards_of([r["rotated"] for r in results], rotated)
    assert_shards_of([r["pools"] for r in results], tuple(pools))


def test_collectives_in_the_layer(found):
    for result in of_both(found, "layer"):
        assert list(result["counts"].values()) == [1]
        assert "all_reduce" in next(iter(result["counts"]))


def test_collectives_in_the_compiled_layer(found):
    """One graph for the prompt and one for a decode step, each with the op and one all-reduce."""
    for result in of_both(found, "compiled_layer"):
        assert len(result["graphs"]) == 2
        for targets in result["graphs"]:
            collectives = [t for t in targets if "c10d" in t and "wait_tensor" not in t]
            assert len(collectives) == 1
            assert "all_reduce" in collectives[0]
            assert sum("_rope_pool_fused" in t or "auto_functionalized" in t for t in targets) == 1


def test_global_head_counts_compiled(found):
    for result in of_both(found, "global_counts_compiled"):
        _, text = result["error"]  # Dynamo's, around the contract's ValueError
        assert "got [7, 2, 64] with num_qo_heads 4, head_dim 64" in text
        assert result["unchanged"]


def test_example():
    command = [sys.executable, EXAMPLES / "tensor_parallel.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "collectives: 0 in the op, 1 in the layer" in done.stdout
    assert done.stdout.endswith("same results\n")
