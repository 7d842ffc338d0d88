"""What the GPU benchmark compares: the op, the copy of the same bytes, eager torch, torch.compile, Triton.

Other projects' kernels are in gpu_vendors.py.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import math
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from common import DTYPES, ROPE_BASE, SHAPES, bytes_of, eager, eager_with_angles, rotated
from gpu_timing import Call
from torch import Tensor

import torch_ropepool

HERE = Path(__file__).parent
POOL_SIZE = 131072
MAX_POSITION = 131071
UNTOUCHED = 7.0  # what the checks fill pools with
PEER_TOLERANCE = 3e-2  # of a head, relative: cosines in bfloat16, or angles in float32 at MAX_POSITION


# ---- The problem


@dataclass
class Inputs:
    """One call's tensors; the pools are shared. What peers want prepared is prepared here."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    slots: Tensor
    k_pool: Tensor
    v_pool: Tensor
    q_out: Tensor  # of the copy
    k_out: Tensor
    long_slots: Tensor  # index_copy_ takes no others, nor does vLLM
    long_positions: Tensor
    cos: Tensor  # [num_tokens, head_dim], of q's dtype
    sin: Tensor
    inv_freq: Tensor  # float32

    def args(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.positions, self.slots, self.k_pool, self.v_pool

    def torch_args(self, *angles: Tensor) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.long_slots, self.k_pool, self.v_pool, *angles


@dataclass
class Problem:
    shape: str
    dtype: str
    num_tokens: int
    inputs: list[Inputs]

    def __str__(self) -> str:
        return f"{self.shape}, {self.dtype}, {self.num_tokens} tokens"

    @property
    def kwargs(self) -> dict[str, float]:
        heads, kv_heads, head_dim = SHAPES[self.shape]
        return {
            "head_dim": head_dim,
            "num_qo_heads": heads,
            "num_kv_heads": kv_heads,
            "rope_base": ROPE_BASE,
        }

    @property
    def bytes(self) -> int:
        return bytes_of(self.shape, self.dtype, self.num_tokens)


def make_pools(shape: str, dtype: str, device: str = "cuda") -> tuple[Tensor, Tensor]:
    _, kv_heads, head_dim = SHAPES[shape]
    k_pool, v_pool = (
        torch.zeros(POOL_SIZE, kv_heads, head_dim, dtype=DTYPES[dtype], device=device) for _ in range(2)
    )
    return k_pool, v_pool


def make_problem(
    shape: str,
    dtype: str,
    num_tokens: int,
    pools: tuple[Tensor, Tensor],
    copies: int,
    device: str = "cuda",
) -> Problem:
    heads, kv_heads, head_dim = SHAPES[shape]
    kind = DTYPES[dtype]
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    inv_freq = ROPE_BASE**-exponents

    def make_inputs() -> Inputs:
        q, k, v = (
            torch.randn(num_tokens, n, head_dim, dtype=kind, device=device)
            for n in (heads, kv_heads, kv_heads)
        )
        positions = torch.randint(0, MAX_POSITION + 1, (num_tokens,), dtype=torch.int32, device=device)
        slots = torch.randperm(POOL_SIZE, device=device)[:num_tokens]
        angles = (positions.double()[:, None] * inv_freq).repeat(1, 2)
        return Inputs(
            q,
            k,
            v,
            positions,
            slots.int(),
            *pools,
            q_out=torch.empty_like(q),
            k_out=torch.empty_like(k),
            long_slots=slots.clone(),
            long_positions=positions.long(),
            cos=angles.cos().to(kind),
            sin=angles.sin().to(kind),
            inv_freq=inv_freq.float(),
        )

    return Problem(shape, dtype, num_tokens, [make_inputs() for _ in range(copies)])


# ---- Peers


@dataclass
class Peer:
    """One row of the tables. The best of its candidates counts, each named by what is special about it."""

    name: str
    in_place: bool
    candidates: dict[str, Call]
    tolerance: float = PEER_TOLERANCE

    @property
    def is_copy(self) -> bool:
        return self.name.startswith("copy")

    @property
    def is_required(self) -> bool:
        return self.name.startswith(("op", "copy"))


def op_peers(problem: Problem) -> list[Peer]:
    fused = partial(torch.ops.ropepool.rope_pool_fused, **problem.kwargs)
    in_place = partial(torch.ops.ropepool.rope_pool_fused_, **problem.kwargs)
    tolerance = 2 * torch.finfo(DTYPES[problem.dtype]).eps
    return [
        Peer("op, fresh", False, {"": lambda x: fused(*x.args())}, tolerance),
        Peer("op, in place", True, {"": lambda x: in_place(*x.args())}, tolerance),
    ]


class CopyArgs(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("q", "k", "v", "q_out", "k_out", "k_pool", "v_pool", "slots")]
        + [("num_tokens", ctypes.c_int64), ("q_chunks", ctypes.c_int32), ("kv_chunks", ctypes.c_int32)]
    )  # fmt: skip


class Floor:
    """The copies: kernels of gpu_floor.cu, called by way of ctypes."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def copy(
        self, x: Inputs, *, variant: int, threads: int, splits: int, in_place: bool
    ) -> tuple[Tensor, Tensor]:
        q_out, k_out = (x.q, x.k) if in_place else (x.q_out, x.k_out)
        tensors = (x.q, x.k, x.v, q_out, k_out, x.k_pool, x.v_pool, x.slots)
        per_token = (x.q[0].nbytes // 16, x.k[0].nbytes // 16)
        args = CopyArgs(*[t.data_ptr() for t in tensors], len(x.q), *per_token)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = self.library.copy_rows(ctypes.byref(args), variant, threads, splits, stream)
        assert status == 0, status
        return q_out, k_out

    def empty(self, _: object = None) -> None:
        status = self.library.empty_launch(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        assert status == 0, status

    def peers(self, problem: Problem) -> list[Peer]:
        x = problem.inputs[0]
        chunks = sum(t[0].nbytes // 16 for t in (x.q, x.k, x.v))

        def candidates(in_place: bool) -> dict[str, Call]:
            calls: dict[str, Call] = {}
            for variant, threads in itertools.product(range(6), (32, 64, 128, 256, 512)):
                unroll = 2 ** (variant // 2)
                most_splits = -(-chunks // (threads * unroll)) if problem.num_tokens < 4096 else 1
                for splits in {1, most_splits}:
                    name = f"{unroll} chunks a thread{', streaming' * (variant % 2)}, {threads} threads"
                    calls[f"{name}, {splits} blocks a token"] = partial(
                        self.copy, variant=variant, threads=threads, splits=splits, in_place=in_place
                    )
            return calls

        return [
            Peer("copy, fresh", False, candidates(False), 0.0),
            Peer("copy, in place", True, candidates(True), 0.0),
        ]


def eager_peers(problem: Problem) -> list[Peer]:
    return [Peer("eager torch", False, {"": lambda x: eager(*x.torch_args(x.cos, x.sin))})]


@cache
def _compiled(function: Callable[..., object], dynamic: bool | None) -> Callable[..., object]:
    return torch.compile(function, fullgraph=True, dynamic=dynamic)


def compile_peers(problem: Problem, static: bool) -> list[Peer]:
    """`static`: compiled for this number of tokens alone. Otherwise once for 1 and once for all others.

    torch keeps at most eight compiled forms of a function: reset it before another shape or dtype.
    """
    if static:
        torch._dynamo.reset()
    dynamic = False if static else None  # None: torch sees by itself that only num_tokens changes
    cached, inside = _compiled(eager, dynamic), _compiled(eager_with_angles, dynamic)
    sizes = "static sizes" if static else "dynamic sizes"
    return [
        Peer("torch.compile", False, {sizes: lambda x: cached(*x.torch_args(x.cos, x.sin))}),
        Peer(
            "torch.compile, angles inside",
            False,
            {sizes: lambda x: inside(*x.torch_args(x.positions, x.inv_freq))},
        ),
    ]


def triton_peers(problem: Problem) -> list[Peer]:
    if importlib.util.find_spec("triton") is None:
        return []
    from rope_pool_triton import CONFIGS, Config, rope_pool_triton

    def call(config: Config, in_place: bool) -> Call:
        return lambda x: rope_pool_triton(
            *x.args(), cos=x.cos, sin=x.sin, inv_freq=x.inv_freq, config=config, in_place=in_place
        )

    return [
        Peer(
            f"{name}, {form}",
            in_place,
            {str(config): call(config, in_place) for config in CONFIGS if config.cached == cached},
        )
        for name, cached in (("Triton", False), ("Triton, cos/sin cached", True))
        for form, in_place in (("fresh", False), ("in place", True))
    ]


# ---- Checks


def check(problem: Problem, peer: Peer, call: Call) -> float:
    """The largest error of a head, relative to its length. Raises if that or a pool's row is wrong."""
    x = problem.inputs[0]
    fill = {"k_pool": UNTOUCHED, "v_pool": UNTOUCHED, "q_out": math.nan, "k_out": math.nan}
    given = replace(
        x,
        q=x.q.clone(),
        k=x.k.clone(),
        **{name: torch.full_like(getattr(x, name), value) for name, value in fill.items()},
    )
    result = call(given)
    q_rot, k_rot = (given.q, given.k) if peer.in_place else result[:2]
    error = 0.0
    for source, got in ((x.q, q_rot), (x.k, k_rot)):
        expected = source.double() if peer.is_copy else rotated(source, x.positions)
        off = (got.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        error = max(error, off.max().nan_to_num(math.inf).item())
    if error > peer.tolerance:
        raise AssertionError(f"{peer.name}: off by {error:.2g}, more than {peer.tolerance:.2g}")
    for pool, rows in ((given.k_pool, k_rot), (given.v_pool, x.v)):
        expected = torch.full_like(pool, UNTOUCHED).index_copy_(0, x.long_slots, rows)
        if not torch.equal(pool, expected):
            raise AssertionError(f"{peer.name}: a pool holds other rows than it should")
    return error


# ---- The libraries


def build_libraries(folder: Path, arch: str = "native") -> tuple[Floor, str]:
    """The floor, and why the empty op could not be built ("" where it was; it is then loaded)."""
    from torch.utils.cpp_extension import include_paths, library_paths

    torch_flags = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DUSE_CUDA"]
    torch_flags += [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
    torch_flags += ["-Xlinker", "--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    floor = nvcc(folder, "gpu_floor", arch, "-std=c++17")
    empty_op = nvcc(folder, "gpu_empty_op", arch, "-std=c++17", *torch_flags)
    _, floor_errors = floor.communicate()
    if floor.returncode != 0:
        raise RuntimeError(floor_errors)
    _, why_no_empty_op = empty_op.communicate()
    if empty_op.returncode == 0:
        try:
            load_empty_op(folder / "gpu_empty_op.so")
            why_no_empty_op = ""
        except OSError as error:
            why_no_empty_op = str(error)
    return Floor(folder / "gpu_floor.so"), why_no_empty_op


def nvcc(folder: Path, name: str, arch: str, *flags: str) -> subprocess.Popen[str]:
    command = ["nvcc", "-O3", f"-arch={arch}", "-shared", "-Xcompiler", "-fPIC"]
    command += ["-o", str(folder / f"{name}.so"), str(HERE / f"{name}.cu"), *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


_kept: list[torch.library.Library] = []


def load_empty_op(library: Path) -> None:
    """Defines torch.ops.ropepool_bench.rope_pool_fused(_), with the real ones' schemas."""
    definitions = torch.library.Library("ropepool_bench", "DEF")
    for name in ("rope_pool_fused", "rope_pool_fused_"):
        schema = str(getattr(torch.ops.ropepool, name).default._schema)
        definitions.define(schema.removeprefix("ropepool::"))
    _kept.append(definitions)
    torch.ops.load_library(library)


def host_calls(problem: Problem, has_empty_op: bool) -> dict[str, Callable[[], object]]:
    """One call each of what is timed on the host."""
    args, kwargs = problem.inputs[0].args(), problem.kwargs
    calls: dict[str, Callable[[], object]] = {}
    for form, name in (("fresh", "rope_pool_fused"), ("in place", "rope_pool_fused_")):
        calls[f"op, {form}"] = partial(getattr(torch.ops.ropepool, name), *args, **kwargs)
        if has_empty_op:
            calls[f"empty op, {form}"] = partial(getattr(torch.ops.ropepool_bench, name), *args, **kwargs)
        calls[f"Python function, {form}"] = partial(getattr(torch_ropepool, name), *args, **kwargs)
    return calls
