"""What the compiled libraries are made of, for setup.py and wheel_macos.py."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

try:  # part of setuptools since 70.1
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).parent.parent
VERSION = re.search(r'"(.+)"', (ROOT / "torch_ropepool/_version.py").read_text()).group(1)
TORCH_TARGET_VERSION = "0x020a000000000000"  # 2.10: the oldest torch that the library runs on

LIBRARY = "torch_ropepool.librope_pool"
LIBRARY_SUFFIXES = {"darwin": ".dylib"}  # elsewhere .so
CSRC = Path("torch_ropepool/csrc")
METAL = Path("torch_ropepool/metal")
SHADER_HEADER = Path("build/generated/rope_pool_shader.h")  # made by embed_shader.py

SANITIZERS = ("address", "undefined", "thread")

# What every library with kernels is made of.
COMMON_SOURCES = [
    CSRC / "contract.cpp",
    CSRC / "frequency_table.cpp",
    CSRC / "overlap.cpp",
    CSRC / "rope_pool_plan.cpp",
    CSRC / "tensor_args.cpp",
]
GPU_SOURCES = [CSRC / "gpu_tables.cpp"]

MACROS = {"TORCH_TARGET_VERSION": TORCH_TARGET_VERSION, "ROPE_POOL_VERSION": f'"{VERSION}"'}


def sources(platform: str) -> list[Path]:
    """Of the library that is loaded everywhere, for a `sys.platform`."""
    return [
        *COMMON_SOURCES,
        CSRC / "c_api.cpp",
        CSRC / "cpu/rope_pool_cpu.cpp",
        CSRC / "cpu/rope_pool_isa.cpp",
        CSRC / "library.cpp",
        CSRC / "refusals.cpp",
        *([*GPU_SOURCES, METAL / "rope_pool_mps.cpp"] if platform == "darwin" else []),
    ]


def sanitizer_args(platform: str) -> list[str]:
    """For compiling and linking. TORCH_ROPEPOOL_SANITIZE names the sanitizer; unset or empty: none."""
    name = os.environ.get("TORCH_ROPEPOOL_SANITIZE", "")
    if name not in ("", *SANITIZERS):
        sys.exit(f"TORCH_ROPEPOOL_SANITIZE must be one of {', '.join(SANITIZERS)}, got {name}")
    if name and platform != "linux":
        sys.exit(f"TORCH_ROPEPOOL_SANITIZE works on Linux only, got {name}")
    if not name:
        return []
    # Python's own flags may bring -fwrapv, with which no overflow of a signed integer is reported.
    return [f"-fsanitize={name}", "-fno-sanitize-recover=all", "-fno-wrapv", "-fno-omit-frame-pointer", "-g1"]


def compile_args() -> list[str]:
    return [
        "-O3",
        "-std=c++17",
        "-ffp-contract=off",  # every fma is written out: rope_math.h
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fvisibility=hidden",
        f"-ffile-prefix-map={ROOT.resolve()}/=",  # no path of the build machine in messages
        "-Wall",
        "-Wextra",
    ]


def library_filename(ext_name: str, platform: str) -> str:
    """A plain shared library beside the package, no Python module."""
    return str(Path(*ext_name.split("."))) + LIBRARY_SUFFIXES.get(platform, ".so")


class PlatformWheel(bdist_wheel):
    """The library holds no Python: one wheel per platform serves every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]
