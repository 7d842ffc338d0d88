"""Runs Metal shaders and the host code that drives them on CPU memory, and watches every access.

    path = metal_emulator.build_host_library([...])   # host code, unchanged, over torch's MPS C shim
    metal_emulator.load(path)
    with metal_emulator.recording(seed=1) as run:
        op._op_dk(DispatchKey.MPS, ...)               # with CPU tensors
    run.dispatches[0].buffers[3].bytes_stored

`run_kernel` runs one kernel of one shader without any host code.

What is loaded and stored is what the shader's text says, before any optimisation. Not emulated: speed,
the GPU's caches and its order of memory beyond barriers, textures, samplers, threadgroup memory that the
host sizes, function constants, argument buffers, atomics of 64 bits and compare-and-swap, comparisons of
vectors (clang's give ints), structs copied whole from or to device or constant memory, member functions
of objects there. sin, cos, exp and the like are the CPU's. Stricter than Metal: every kernel argument
needs an attribute; no derived classes, no C++17 and no recursion, which newer Metals allow.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from .compiler import Compiler, build_library, build_runtime, build_set_arg_bytes
from .errors import CompileError, Fault

__all__ = [
    "CompileError",
    "Dispatch",
    "Fault",
    "Run",
    "Traffic",
    "build_host_library",
    "compile_options",
    "load",
    "recording",
    "run_kernel",
    "shim",
]

if sys.platform != "linux":
    pytest.skip("the Metal emulator is made for Linux", allow_module_level=True)


# ---- What a recording tells


@dataclass
class Traffic:
    """Of one buffer in one dispatch."""

    name: str
    bytes_loaded: int = 0
    bytes_stored: int = 0
    distinct_bytes_loaded: int = 0
    distinct_bytes_stored: int = 0
    bytes_reloaded: int = 0  # by a thread that had loaded them before


@dataclass
class Dispatch:
    kernel: str
    grid: tuple[int, int, int]
    group: tuple[int, int, int]
    buffers: dict[int, Traffic]
    constants: Traffic  # namespace-scope arrays
    threadgroup: Traffic
    calls: Counter[str]  # how often each of the shader's functions was called, by qualified name

    @property
    def threads(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    def buffer(self, name: str) -> Traffic:
        """By the name that the kernel gives it."""
        return next(traffic for traffic in self.buffers.values() if traffic.name == name)


@dataclass
class Run:
    """What happened in a `recording`. Filled when it ends."""

    dispatches: list[Dispatch] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    command_blocks: int = 0
    libraries: int = 0
    pipelines: int = 0
    allocations: list[int] = field(default_factory=list)  # bytes of each tensor that host code made
    torch_calls: Counter[str] = field(default_factory=Counter)  # ops that host code called

    def unwritten(self, tensor: Tensor) -> int:
        """Bytes of an uninitialised tensor's storage that nothing was stored to; before the end."""
        return runtime().metal_emulator_unwritten(handle(tensor))


# ---- The runtime library


def handle(tensor: Tensor) -> ctypes.c_void_p:
    """An AtenTensorHandle: points to a Tensor, which is a pointer to its implementation."""
    implementation = ctypes.c_void_p(tensor._cdata)
    pointer = ctypes.cast(ctypes.pointer(implementation), ctypes.c_void_p)
    pointer.keep = (implementation, tensor)  # type: ignore[attr-defined]
    return pointer


COMPILE = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint64)
ENCODE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)

_compiler = Compiler()


@COMPILE
def _compile(source: bytes, result: int, size: int) -> None:
    try:
        text = str(_compiler.compile(source.decode("latin-1"), build_runtime()))
    except Exception as e:  # goes to the host code, as an error of the shim
        text = f"!{e}"
    encoded = text.encode("ascii", "backslashreplace")[: size - 1]
    ctypes.memmove(result, encoded + b"\0", len(encoded) + 1)


@cache
def runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_runtime()))
    library.metal_emulator_report.restype = ctypes.c_char_p
    library.metal_emulator_unwritten.restype = ctypes.c_int64
    library.metal_emulator_begin.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_bool]
    library.metal_emulator_set_compiler(_compile, False)
    return library


@contextmanager
def compile_options(
    *, metal_version: int = 320, fast_math: bool = False, lazy: bool = False
) -> Iterator[None]:
    """For the shader libraries made meanwhile.

    fast_math: as with PYTORCH_MPS_FAST_MATH=1. lazy: a shader's errors come from get_kernel_function.
    """
    global _compiler
    before = _compiler
    _compiler = Compiler(metal_version, fast_math)
    runtime().metal_emulator_set_compiler(_compile, lazy)
    try:
        yield
    finally:
        _compiler = before
        runtime().metal_emulator_set_compiler(_compile, False)


@contextmanager
def failing(function: str, at_call: int = 1) -> Iterator[None]:
    """A call of one of the shim's functions fails meanwhile: the first from here, or a later one."""
    runtime().metal_emulator_fail(function.encode(), at_call)
    try:
        yield
    finally:
        runtime().metal_emulator_fail(b"", 0)


def build_host_library(
    sources: Sequence[Path | str],
    *,
    name: str = "metal_host",
    flags: Sequence[str] = (),
    depends: Sequence[Path | str] = (),
    set_arg_bytes: bool = False,
) -> Path:
    """Host code linked with the emulator; built anew when a source, what lies beside it, or a file of
    `depends` has changed. set_arg_bytes: with what torch 2.14 adds to the shim."""
    paths = [Path(source) for source in sources]
    beside = [p for path in paths for p in path.parent.rglob("*") if p.suffix in (".h", ".metal", ".inc")]
    libraries = [build_set_arg_bytes(build_runtime())] if set_arg_bytes else []
    return build_library(
        name,
        paths,
        depends={*beside, *map(Path, depends)},
        flags=flags,
        link_with=[*libraries, build_runtime()],
    )


def load(path: Path | str) -> None:
    """Loads host code: its kernels are then registered."""
    runtime()
    torch.ops.load_library(str(path))


# ---- Recording


@cache
def _functions(shader: str) -> list[str]:
    return json.loads(Path(shader).with_suffix(".functions.json").read_text())


def _dispatch(report: Mapping[str, Any]) -> Dispatch:
    calls: Counter[str] = Counter()
    for function, count in zip(_functions(report["shader"]), report["calls"], strict=True):
        if count and not function.startswith(("metal_emulator", "metal::", "__")):
            calls[function] += count
    return Dispatch(
        report["kernel"],
        tuple(report["grid"]),
        tuple(report["group"]),
        {int(index): Traffic(name, **traffic) for index, (name, traffic) in report["buffers"].items()},
        Traffic("constants", **report["constants"]),
        Traffic("threadgroup", **report["threadgroup"]),
        calls,
    )


def _read_report(run: Run) -> None:
    report = json.loads(runtime().metal_emulator_report())
    run.dispatches = [_dispatch(d) for d in report["dispatches"]]
    run.faults = report["faults"]
    if report["suppressed_faults"]:
        run.faults.append(f"and {report['suppressed_faults']} more of these")
    for name in ("command_blocks", "libraries", "pipelines", "allocations"):
        setattr(run, name, report[name])
    run.torch_calls = Counter(report["torch_calls"])


_recording: Run | None = None


@contextmanager
def recording(
    seed: int = 0,
    *,
    uninitialised: Sequence[Tensor] = (),
    max_threads: int = 1024,
    flush_denormals: bool = False,
    raises: bool = True,
) -> Iterator[Run]:
    """Records what shaders and host code do; raises Fault at the end if they did anything wrong.

    seed: of the order in which threads run. uninitialised: to load from these before a store is a
    fault; tensors that the host code itself makes are so anyway. max_threads: the most that a
    threadgroup of any kernel may have.
    """
    global _recording
    if _recording is not None:
        raise RuntimeError("a recording inside a recording")
    library = runtime()
    library.metal_emulator_begin(seed, max_threads, flush_denormals)
    for tensor in uninitialised:
        library.metal_emulator_mark_uninitialised(handle(tensor))
    run = _recording = Run()
    try:
        yield run
    except Exception as e:
        _read_report(run)
        if run.faults and raises:
            raise Fault("\n".join(run.faults)) from e
        raise
    else:
        _read_report(run)
        if run.faults and raises:
            raise Fault("\n".join(run.faults))
    finally:
        _recording = None
        library.metal_emulator_end()


# ---- Without host code


class Shim:
    """The C functions as Python calls them: `shim.start_encoding(f)`. Raises where they return an error."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        library = torch_2_14() if name == "set_arg_bytes" else runtime()
        prefix = "torch_mps_" if name == "set_arg_bytes" else "aoti_torch_mps_"
        function = getattr(library, prefix + name)

        def call(*args: Any) -> None:
            if function(*args):
                raise RuntimeError(last_error())

        return call

    def create_library(self, source: str) -> ctypes.c_void_p:
        library = ctypes.c_void_p()
        self.create_shader_library(source.encode(), ctypes.byref(library))
        return library

    def function(self, library: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        self.get_kernel_function(library, name.encode(), ctypes.byref(function))
        return function

    def command_block(self, function: ctypes.c_void_p, encode: Callable[[], None]) -> None:
        raised: list[BaseException] = []

        def body(_function: int, _data: int) -> None:
            try:
                encode()
            except BaseException as e:
                raised.append(e)

        self.run_command_block(function, ENCODE(body), None)
        if raised:
            raise raised[0]

    def set_arg(self, function: ctypes.c_void_p, index: int, value: Tensor | int | bytes) -> None:
        if isinstance(value, Tensor):
            self.set_arg_tensor(function, index, handle(value))
        elif isinstance(value, int):
            self.set_arg_int(function, index, ctypes.c_int64(value))
        else:
            self.set_arg_bytes(function, index, value, ctypes.c_uint64(len(value)))

    def dispatch(
        self, function: ctypes.c_void_p, threads: Sequence[int], group: Sequence[int] | None
    ) -> None:
        grid = (ctypes.c_uint64 * len(threads))(*threads)
        if group is None:
            self.dispatch_array(function, grid, ctypes.c_size_t(len(threads)))
        else:
            size = (ctypes.c_uint64 * len(group))(*group)
            self.dispatch_array_with_group_size(
                function, grid, ctypes.c_size_t(len(threads)), size, ctypes.c_size_t(len(group))
            )


shim = Shim()


@cache
def torch_2_14() -> ctypes.CDLL:
    runtime()
    return ctypes.CDLL(str(build_set_arg_bytes(build_runtime())))


def last_error() -> str:
    """What the shim last said, from torch 2.13 on."""
    library = ctypes.CDLL("libtorch_cpu.so")
    try:
        what = library.torch_exception_get_what_without_backtrace
    except AttributeError:
        return "a function of the MPS shim failed"
    what.restype = ctypes.c_char_p
    return (what() or b"").decode()


def run_kernel(
    source: str,
    kernel: str,
    args: Sequence[Tensor | int | bytes],
    threads: int | Sequence[int],
    group: int | Sequence[int] | None = None,
    **options: Any,
) -> Run:
    """One dispatch, its arguments bound to buffers 0, 1, ... . Further options: those of `recording`."""
    grid = (threads,) if isinstance(threads, int) else threads
    size = (group,) if isinstance(group, int) else group
    with recording(**options) as run:
        try:
            function = shim.function(shim.create_library(source), kernel)
        except RuntimeError as e:
            raise CompileError(str(e)) from None

        def encode() -> None:
            shim.start_encoding(function)
            for index, value in enumerate(args):
                shim.set_arg(function, index, value)
            shim.dispatch(function, grid, size)

        shim.command_block(function, encode)
    return run
