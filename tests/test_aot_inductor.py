"""examples/aot_inductor: exported, packaged, and run from Python and from a C++ program without Python."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import torch._inductor.codecache  # which aoti_load_package of torch 2.10 uses without importing it
from checks import assert_same_bits, largest_allocation
from sample import OPS
from torch import Tensor
from torch._inductor.utils import fresh_inductor_cache
from torch.utils.cpp_extension import include_paths, library_paths

import torch_ropepool

EXAMPLE = Path(__file__).parent.parent / "examples" / "aot_inductor"
PACKAGE = Path(torch_ropepool.__file__).parent
MACOS = sys.platform == "darwin"
TOOLS_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # cmake, ninja

# An exception is all that AOTInductor promises; torch 2.13 hands the op's text on.
BAD_SLOT = r"slots\[\d+\] is 4096, out of range for pool_size 4096|API call failed"


@pytest.fixture(scope="module", autouse=True)
def fresh_compiler(tmp_path_factory) -> Iterator[None]:
    """Inductor's caches do not see a change of a composite or of a fake kernel."""
    with fresh_inductor_cache(dir=str(tmp_path_factory.mktemp("inductor"))):
        yield


def load_export() -> ModuleType:
    spec = importlib.util.spec_from_file_location("aot_inductor_export", EXAMPLE / "export.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


export = load_export()


class Example(NamedTuple):
    package: Path
    steps: Path
    program: Path


def build_commands(program: Path) -> list[list[object]]:
    if torch.version.cuda:
        return [compiler_command(program)]
    cmake = shutil.which("cmake", path=TOOLS_PATH)
    assert cmake, "the tests need cmake: pip install cmake"
    configure = [
        *(cmake, "-G", "Ninja", "-S", EXAMPLE, "-B", program.parent),
        f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
        f"-DROPEPOOL_LIBRARY={torch_ropepool.library_path()}",
    ]
    return [configure, [cmake, "--build", program.parent]]


def compiler_command(program: Path) -> list[object]:
    """Without CMake, where find_package(Torch) of a CUDA build wants the CUDA toolkit."""
    program.parent.mkdir()
    return [
        *(os.environ.get("CXX", "c++"), "-std=c++20", EXAMPLE / "main.cpp", "-o", program),
        f'-DROPEPOOL_LIBRARY="{torch_ropepool.library_path()}"',
        *(f"-I{path}" for path in include_paths()),
        *(f"{flag}{path}" for path in library_paths() for flag in ("-L", "-Wl,-rpath,")),
        *("-ltorch", "-ltorch_cpu", "-lc10", "-ldl"),
    ]


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Example:
    """What the commands in export.py make. The two take long, so they run side by side."""
    folder = tmp_path_factory.mktemp("example")
    made = Example(folder / "attention.pt2", folder / "steps.pt", folder / "build" / "attention")
    environment = {**os.environ, "PATH": TOOLS_PATH, "PYTHONPATH": str(PACKAGE.parent)}
    with subprocess.Popen(
        [sys.executable, EXAMPLE / "export.py", made.package, made.steps], env=environment
    ) as exporting:
        for command in build_commands(made.program):
            result = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert result.returncode == 0, result.stdout + result.stderr
    assert exporting.returncode == 0
    return made


def wrapper_code(package: Path) -> str:
    """The C++ that Inductor generated around its kernels."""
    with zipfile.ZipFile(package) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".wrapper.cpp"))
        return archive.read(name).decode()


# ---- In Python


def own_pools(package, model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of the model's buffers, given to the package in place of its own, so that they can be seen."""
    pools = {name: pool.clone() for name, pool in model.named_buffers()}
    package.load_constants(pools, check_full_update=False, user_managed=True)
    return pools


def assert_same_pools(pools: dict[str, Tensor], model: torch.nn.Module) -> None:
    assert pools.keys() == dict(model.named_buffers()).keys()
    for name, pool in model.named_buffers():
        assert_same_bits(pools[name], pool)


@torch.inference_mode()
def test_same_bits_as_eager(example):
    """On the package's own pools: that they are written shows in later steps, whose tokens read them."""
    package, model = torch._inductor.aoti_load_package(str(example.package)), export.make_model()
    for step in export.make_steps([1, 2, 1, 7, 100, 1], seed=1):
        assert_same_bits(package(*step), model(*step))


@pytest.mark.parametrize("one_buffer", [False, True])
@torch.inference_mode()
def test_pools_that_the_caller_owns(example, one_buffer):
    """Instead of the package's: tensors of their own, or views of one [layers, 2, pool, heads, dim]."""
    package, model = torch._inductor.aoti_load_package(str(example.package)), export.make_model()
    pools = {name: pool.clone() for name, pool in model.named_buffers()}
    if one_buffer:
        buffer = torch.stack(list(pools.values())).unflatten(0, (export.NUM_LAYERS, 2))
        pools = dict(zip(pools, buffer.flatten(0, 1), strict=True))
    package.load_constants(pools, check_full_update=False, user_managed=True)
    for step in export.make_steps([2, 1, 5]):
        assert_same_bits(package(*step), model(*step))
    assert all(pool.any() for pool in pools.values())
    assert_same_pools(pools, model)


@torch.inference_mode()
def test_bad_slot_writes_nothing(example):
    package, model = torch._inductor.aoti_load_package(str(example.package)), export.make_model()
    pools = own_pools(package, model)
    x, positions, slots, context = export.make_steps([5])[0]
    bad_slots = slots.clone()
    bad_slots[-1] = export.POOL_SIZE
    with pytest.raises(RuntimeError, match=BAD_SLOT):
        package(x, positions, bad_slots, context)
    assert_same_pools(pools, model)
    assert_same_bits(package(x, positions, slots, context), model(x, positions, slots, context))


@torch.inference_mode()
def test_allocates_nothing_of_a_pools_size(example):
    package = torch._inductor.aoti_load_package(str(example.package))
    step = export.make_steps([40])[0]
    pool = export.make_model().layers[0].k_pool
    package(*step)
    assert step[0].nbytes <= largest_allocation(lambda: package(*step)) < pool.nbytes / 4
    assert largest_allocation(lambda: (package(*step), pool.clone())) >= pool.nbytes


# ---- In C++


def run_program(example: Example, steps: Path) -> subprocess.CompletedProcess[str]:
    """With no PATH to a Python, nor its variables. A matmul's bits depend on the number of threads."""
    threads = {name: value for name, value in os.environ.items() if name.endswith("_NUM_THREADS")}
    command = [example.program, example.package, steps]
    return subprocess.run(command, env=threads, capture_output=True, text=True)


def test_cpp_program(example):
    result = run_program(example, example.steps)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    counts = [line.split(",")[0] for line in lines if line.startswith("step ")]
    assert counts == [f"step {i}: {n} tokens" for i, n in enumerate(export.TOKEN_COUNTS)]
    for line in lines[: len(counts)]:
        assert line.endswith("same bits as eager")
    assert lines[len(counts)] == "pools: same bits as eager"
    assert re.match(f"bad slot: .*({BAD_SLOT})", lines[len(counts) + 1])
    assert lines[-1] == "bad slot: refused, pools kept"


def test_cpp_program_prints_what_python_computes(example):
    """Its sums, so that they do not rest on its own comparison."""
    model = export.make_model()
    printed = [
        line.split("sum ")[1].split(",")[0]
        for line in run_program(example, example.steps).stdout.splitlines()[:5]
    ]
    for text, step in zip(printed, export.make_steps(export.TOKEN_COUNTS), strict=True):
        assert float(text) == pytest.approx(model(*step).sum().item(), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("where", ["step 2", "pools"])
def test_cpp_program_sees_one_wrong_bit(example, tmp_path, where):
    inputs, outputs, pools = torch.load(example.steps)
    changed = outputs[2] if where == "step 2" else pools["layers.1.v_pool"]
    changed.view(torch.int32).flatten()[-1] ^= 1
    torch.save((inputs, outputs, pools), tmp_path / "steps.pt")
    result = run_program(example, tmp_path / "steps.pt")
    assert result.returncode == 1
    differing = [line.split(":")[0] for line in result.stdout.splitlines() if "DIFFER" in line]
    assert differing == [where]


def test_links_no_python(example, tmp_path):
    """The program, the library, and the library in the package."""
    with zipfile.ZipFile(example.package) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".wrapper.so"))
        compiled = archive.extract(name, tmp_path)
    for binary in (example.program, torch_ropepool.library_path(), compiled):
        command = ["otool", "-L", binary] if MACOS else ["ldd", binary]
        linked = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert "torch_cpu" in linked
        assert "python" not in "".join(line.split("/")[-1] for line in linked.splitlines()[MACOS:]).lower()


def test_cmake_without_the_library_says_what_to_pass(tmp_path):
    cmake = shutil.which("cmake", path=TOOLS_PATH)
    result = subprocess.run(
        [cmake, "-G", "Ninja", "-S", EXAMPLE, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"],
        env={**os.environ, "PATH": TOOLS_PATH},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert result.returncode != 0
    assert "-DROPEPOOL_LIBRARY=$(python" in result.stderr


# ---- Pools that are views: layer 1 alone, so that a lost offset shows

LAYERS, POOL_SIZE, HEADS, DIM = 3, 512, 2, 16


def store(inputs: tuple[Tensor, ...], k_pool: Tensor, v_pool: Tensor) -> Tensor:
    result: Tensor = OPS["rope_pool_fused"](
        *inputs, k_pool, v_pool, head_dim=DIM, num_qo_heads=4, num_kv_heads=HEADS, rope_base=10000.0
    )[0]
    return result


def inputs_of(num_tokens: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens)
    q, k, v = (torch.randn(num_tokens, heads, DIM, generator=generator) for heads in (4, HEADS, HEADS))
    slots = torch.randperm(POOL_SIZE, generator=generator)[:num_tokens]
    return q, k, v, torch.arange(num_tokens) + 7, slots


def package_of(module: torch.nn.Module, pools: tuple[Tensor, ...], path: Path, **config: object) -> Path:
    num_tokens = torch.export.Dim("num_tokens")
    program = torch.export.export(
        module,
        (inputs_of(3), pools),
        dynamic_shapes=(({0: num_tokens},) * 5, (None,) * len(pools)),
    )
    torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(path),
        inductor_configs={f"aot_inductor.{name}": value for name, value in config.items()},
    )
    return path


class LayerOne(torch.nn.Module):
    """Layer 1 of: one buffer, two buffers, an argument; and pools that are arguments themselves."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"both": (LAYERS, 2), "keys": (LAYERS,), "values": (LAYERS,)}.items():
            self.register_buffer(name, torch.zeros(*shape, POOL_SIZE, HEADS, DIM))

    def forward(self, inputs, pools):
        argument, k_pool, v_pool = pools
        return (
            store(inputs, self.both[1, 0], self.both[1, 1]),
            store(inputs, self.keys[1], self.values[1]),
            store(inputs, argument[1, 0], argument[1, 1]),
            store(inputs, k_pool, v_pool),
        )


def zeros(*leading: int) -> Tensor:
    return torch.zeros(*leading, POOL_SIZE, HEADS, DIM)


def test_pools_as_views(tmp_path):
    """Views made in the graph; and views given to a package that was exported with pools of their own."""
    model = LayerOne()
    path = package_of(model, (zeros(LAYERS, 2), zeros(), zeros()), tmp_path / "views.pt2")
    package = torch._inductor.aoti_load_package(str(path))
    with torch.inference_mode():
        pools = own_pools(package, model)
        got, want = ((zeros(LAYERS, 2), zeros(LAYERS, 2)) for _ in range(2))
        for num_tokens in (3, 1, 2, 0, 50):
            inputs = inputs_of(num_tokens)
            results = package(inputs, (got[0], *got[1][1]))
            for a, b in zip(results, model(inputs, (want[0], *want[1][1])), strict=True):
                assert_same_bits(a, b)
        assert_same_pools(pools, model)
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)
            assert a.flatten(2).any(-1).tolist() == [[False, False], [True, True], [False, False]]
        assert largest_allocation(lambda: package(inputs, (got[0], *got[1][1]))) < zeros().nbytes
    assert "clone" not in wrapper_code(path)


class Pools(torch.nn.Module):
    """The pools of each layer are buffers, or arguments."""

    def __init__(self, *buffers: Tensor) -> None:
        super().__init__()
        for i, buffer in enumerate(buffers):
            self.register_buffer(f"pool{i}", buffer)

    def forward(self, inputs, arguments):
        pools = [*self.buffers(), *arguments]
        return torch.stack([store(inputs, *pools[i : i + 2]) for i in range(0, len(pools), 2)])


@pytest.mark.parametrize("given_as", ["buffers", "arguments"])
def test_pools_that_share_a_storage_at_export(tmp_path, given_as):
    """Of two buffers, or two arguments, that are views of one tensor, AOTInductor (not torch.compile) would copy
    the second at every call, from the tensor's start, which it takes to lie before it as it did at export. A
    buffer is packaged on its own, so the pool would get rows of other memory: refused.
    """
    shared = zeros(LAYERS, 2)[1].unbind()
    buffers, arguments = (shared, ()) if given_as == "buffers" else ((), shared)
    with pytest.raises(ValueError, match="are two inputs of the graph, of which Inductor would copy one"):
        package_of(Pools(*buffers), arguments, tmp_path / "copies.pt2", package_cpp_only=True)
    own = tuple(pool.clone() for pool in shared)
    buffers, arguments = (own, ()) if given_as == "buffers" else ((), own)
    path = package_of(Pools(*buffers), arguments, tmp_path / "good.pt2", package_cpp_only=True)
    assert "clone" not in wrapper_code(path)


def test_layers_that_share_a_storage_at_export(tmp_path):
    """Not the pools of one call, but those of two layers: they are right."""
    keys, values = zeros(LAYERS), zeros(LAYERS)
    model = Pools(keys[1], values[1], keys[2], values[2])
    package = torch._inductor.aoti_load_package(str(package_of(model, (), tmp_path / "layers.pt2")))
    pools = own_pools(package, model)
    for num_tokens in (3, 1, 50):
        assert_same_bits(package(inputs_of(num_tokens), ()), model(inputs_of(num_tokens), ()))
    assert_same_pools(pools, model)
