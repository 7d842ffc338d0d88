"""Tensor parallel: attention heads and KV pools sharded over processes, no communication added by the op.

    python examples/tensor_parallel.py
    python examples/tensor_parallel.py --processes 4

RoPE and the pool write treat every head by itself. So a process that holds some heads of q, k, v and of
the pools calls the op on those alone, through torch's `local_map`, with its own head counts.

An attention layer (projections, op, attention, output projection) runs a prompt and three decode steps,
once on whole tensors in one process and once sharded over a DeviceMesh. The op's outputs and the pools
must have the same bits. The op must run no collective, and the layer only the all-reduce that every
tensor-parallel output projection has. Anything else is exit status 1.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import local_map

from torch_ropepool import rope_pool_fused

HIDDEN_SIZE = 128
POOL_SIZE = 16
PROMPT_TOKENS = 6
PADDING_TOKENS = 2
DECODE_STEPS = 3
# The outputs reach 5. The all-reduce adds in another order, which moved them by up to 1e-6.
OUTPUT_TOLERANCE = 1e-5

HEADS = [Shard(1)]  # q, k, v and the pools have their heads in dim 1
WHOLE = [Replicate()]


class Shape(NamedTuple):
    """The keyword arguments of the op."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rope_base: float


RopePool = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]

SHAPE = Shape(num_qo_heads=8, num_kv_heads=4, head_dim=64, rope_base=10000.0)
whole_rope_pool = partial(rope_pool_fused, **SHAPE._asdict())


class Weights(NamedTuple):
    q: Tensor  # [num_heads * head_dim, HIDDEN_SIZE], as k and v
    k: Tensor
    v: Tensor
    out: Tensor  # [HIDDEN_SIZE, num_qo_heads * head_dim]


class Step(NamedTuple):
    x: Tensor  # [num_tokens, HIDDEN_SIZE]
    positions: Tensor  # [num_tokens]
    slots: Tensor  # [num_tokens], -1 for padding
    context: Tensor  # [num_context], the slots of all tokens so far
    mask: Tensor  # [num_tokens, num_context], True where the token attends


def shape_per_process(shape: Shape, num_processes: int) -> Shape:
    """The head counts that one process passes to the op.

    Raises ValueError where heads do not divide. With uneven shards the op refuses the wrong counts on some
    processes only, and the others would wait for them in the next collective.
    """
    for name in ("num_qo_heads", "num_kv_heads"):
        heads = getattr(shape, name)
        if heads % num_processes:
            raise ValueError(f"{name} must be a multiple of the {num_processes} processes, got {heads}")
    return shape._replace(
        num_qo_heads=shape.num_qo_heads // num_processes, num_kv_heads=shape.num_kv_heads // num_processes
    )


def sharded_rope_pool(mesh: DeviceMesh, local_shape: Shape) -> RopePool:
    """The op on DTensors whose heads are sharded. Positions and slots are the same on every process.

    A sharding rule (`register_sharding`) would not do: it cannot change the head counts among the arguments.
    """
    return local_map(
        partial(rope_pool_fused, **local_shape._asdict()),
        out_placements=(HEADS, HEADS, HEADS, HEADS),
        in_placements=(HEADS, HEADS, HEADS, WHOLE, WHOLE, HEADS, HEADS),
        device_mesh=mesh,
    )


def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, context: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k_pool[context], v_pool[context]))
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return attended[0].transpose(0, 1).flatten(1)


def sharded_attend(mesh: DeviceMesh) -> Callable[..., Tensor]:
    return local_map(
        attend,
        out_placements=HEADS,
        in_placements=(HEADS, HEADS, HEADS, WHOLE, WHOLE),
        device_mesh=mesh,
    )


def attention_layer(
    weights: Weights,
    step: Step,
    k_pool: Tensor,
    v_pool: Tensor,
    rope_pool: RopePool = whole_rope_pool,
    attend: Callable[..., Tensor] = attend,
) -> tuple[Tensor, Tensor, Tensor]:
    """The rotated q and k, and the layer's output: for tensors and for DTensors."""
    q, k, v = (F.linear(step.x, w).unflatten(1, (-1, SHAPE.head_dim)) for w in weights[:3])
    q_rot, k_rot, k_pool, v_pool = rope_pool(q, k, v, step.positions, step.slots, k_pool, v_pool)
    out = F.linear(attend(q_rot, k_pool, v_pool, step.context, step.mask), weights.out)
    if isinstance(out, DTensor):  # each process has the sum over its own heads
        out = out.redistribute(placements=WHOLE)
    return q_rot, k_rot, out


def make_inputs() -> tuple[Weights, list[Step]]:
    """Weights, and one sequence: a padded prompt, then steps of one token. The same in every process."""
    generator = torch.Generator().manual_seed(0)

    # Small multiples of 1/8 and 1/32: sums of their products are exact in any order. So q, k and v have the
    # same bits whichever way a matrix product is split, and what is compared is the op.
    def exact(rows: int, columns: int, scale: float) -> Tensor:
        return torch.randint(-8, 9, (rows, columns), generator=generator) * scale

    qo_size, kv_size = SHAPE.num_qo_heads * SHAPE.head_dim, SHAPE.num_kv_heads * SHAPE.head_dim
    q, k, v = (exact(size, HIDDEN_SIZE, 1 / 32) for size in (qo_size, kv_size, kv_size))
    weights = Weights(q, k, v, exact(HIDDEN_SIZE, qo_size, 1 / 64))

    slots = torch.randperm(POOL_SIZE, generator=generator)
    steps = []
    for n in range(1 + DECODE_STEPS):
        stop = PROMPT_TOKENS + n
        start, padding = (stop - 1, 0) if n else (0, PADDING_TOKENS)
        positions = torch.arange(start, stop + padding)
        stored = torch.where(positions < stop, slots[positions], -1)
        mask = torch.arange(stop) <= positions[:, None]
        steps.append(Step(exact(len(positions), HIDDEN_SIZE, 1 / 8), positions, stored, slots[:stop], mask))
    return weights, steps


def shard_weights(weights: Weights, mesh: DeviceMesh) -> Weights:
    rows, columns = [Shard(0)], [Shard(1)]
    q, k, v = (distribute_tensor(w, mesh, rows) for w in weights[:3])
    return Weights(q, k, v, distribute_tensor(weights.out, mesh, columns))


def replicate_x(step: Step, mesh: DeviceMesh) -> Step:
    return step._replace(x=DTensor.from_local(step.x, mesh, WHOLE, run_check=False))


@contextmanager
def process_group(rank: int, num_processes: int, rendezvous: Path) -> Iterator[DeviceMesh]:
    """A mesh of the processes, which meet by a file. gloo talks over the loopback interface only."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    dist.init_process_group(
        "gloo",
        init_method=rendezvous.as_uri(),
        rank=rank,
        world_size=num_processes,
        timeout=timedelta(seconds=30),
    )
    try:
        yield init_device_mesh("cpu", (num_processes,), mesh_dim_names=("heads",))
    finally:
        dist.destroy_process_group()


def same_bits(sharded: Tensor, whole: Tensor) -> bool:
    assert isinstance(sharded, DTensor)
    return torch.equal(sharded.full_tensor().view(torch.int32), whole.view(torch.int32))


@torch.no_grad()
def compare(mesh: DeviceMesh) -> bool:
    """Runs both ways in every process; the first one prints."""
    report = print if mesh.get_rank() == 0 else lambda *args: None
    local_shape = shape_per_process(SHAPE, mesh.size())
    rope_pool = sharded_rope_pool(mesh, local_shape)
    layer = partial(attention_layer, rope_pool=rope_pool, attend=sharded_attend(mesh))
    weights, steps = make_inputs()
    sharded_weights = shard_weights(weights, mesh)
    sharded_steps = [replicate_x(step, mesh) for step in steps]
    pool_shape = (POOL_SIZE, SHAPE.num_kv_heads, SHAPE.head_dim)
    pools = [torch.zeros(pool_shape) for _ in "kv"]
    sharded_pools = [zeros(pool_shape, device_mesh=mesh, placements=HEADS) for _ in "kv"]

    report(
        f"{mesh.size()} processes, each with {local_shape.num_qo_heads} of {SHAPE.num_qo_heads} query heads "
        f"and {local_shape.num_kv_heads} of {SHAPE.num_kv_heads} KV heads"
    )
    same = []
    report("tokens   q and k rotated   k and v pool   output differs by")
    for step, sharded_step in zip(steps, sharded_steps, strict=True):
        q_rot, k_rot, out = attention_layer(weights, step, *pools)
        sharded_q_rot, sharded_k_rot, sharded_out = layer(sharded_weights, sharded_step, *sharded_pools)
        rotated = same_bits(sharded_q_rot, q_rot) and same_bits(sharded_k_rot, k_rot)
        stored = all(same_bits(sharded, whole) for sharded, whole in zip(sharded_pools, pools, strict=True))
        difference = (sharded_out.full_tensor() - out).abs().max().item()
        same += [rotated, stored, difference <= OUTPUT_TOLERANCE]
        texts = ["same bits" if equal else "DIFFER" for equal in (rotated, stored)]
        report(f"{len(step.x):6}   {texts[0]:15}   {texts[1]:12}   {difference:.1e}")

    in_op = CommDebugMode()

    def counted_rope_pool(*args: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with in_op:
            return rope_pool(*args)

    with CommDebugMode() as in_layer:
        layer(sharded_weights, sharded_steps[-1], *sharded_pools, rope_pool=counted_rope_pool)
    counts = in_op.get_total_counts(), in_layer.get_total_counts()
    report(f"collectives: {counts[0]} in the op, {counts[1]} in the layer (its output's all-reduce)")
    return all(same) and counts == (0, 1)


def run_process(rank: int, num_processes: int, rendezvous: Path) -> None:
    torch.set_num_threads(1)  # the processes share the cores
    with process_group(rank, num_processes, rendezvous) as mesh:
        good = compare(mesh)
    sys.exit(0 if good else 1)


def make_parser() -> argparse.ArgumentParser:
    description, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, choices=(2, 4), help="default: 2")
    return parser


def main() -> int:
    args = make_parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(run_process, (args.processes, Path(folder) / "rendezvous"), nprocs=args.processes)
        except mp.ProcessExitedException:
            print("results DIFFER")
            return 1
    print("same results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
