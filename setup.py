"""Builds the compiled library. Everything else is in pyproject.toml."""

import re
import sys
from pathlib import Path

from setuptools import setup

try:
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError:
    sys.exit(
        "torch_ropepool is built against the torch that is installed, and there is none.\n"
        "Install torch >= 2.10 and ninja, then run: pip install --no-build-isolation ."
    )

try:  # part of setuptools since 70.1
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).parent
VERSION = re.search(r'"(.+)"', (ROOT / "torch_ropepool/_version.py").read_text()).group(1)
TORCH_TARGET_VERSION = "0x020a000000000000"  # 2.10: the oldest torch that the library runs on
WINDOWS = sys.platform == "win32"

SOURCES = [
    "c_api.cpp",
    "contract.cpp",
    "cpu/rope_pool_cpu.cpp",
    "cpu/rope_pool_isa.cpp",
    "frequency_table.cpp",
    "library.cpp",
    "overlap.cpp",
    "refusals.cpp",
    "tensor_args.cpp",
]


class BuildLibrary(BuildExtension):
    """A plain shared library beside the package, no Python module."""

    def get_ext_filename(self, ext_name: str) -> str:
        suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
        return str(Path(*ext_name.split("."))) + suffix

    def get_export_symbols(self, ext):
        return []  # no PyInit function


class PlatformWheel(bdist_wheel):
    """The library holds no Python: one wheel per platform serves every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        CppExtension(
            "torch_ropepool.librope_pool",
            [f"torch_ropepool/csrc/{source}" for source in SOURCES],
            py_limited_api=True,  # link no Python
            define_macros=[
                ("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION),
                ("ROPE_POOL_VERSION", f'"{VERSION}"'),
            ],
            extra_compile_args=["/O2", "/std:c++17", "/fp:precise"]
            if WINDOWS
            else [
                "-O3",
                "-std=c++17",
                "-ffp-contract=off",  # every fma is written out: rope_math.h
                "-fno-math-errno",
                "-fno-trapping-math",
                "-fvisibility=hidden",
                f"-ffile-prefix-map={ROOT.resolve()}/=",  # no path of the build machine in messages
                "-Wall",
                "-Wextra",
            ],
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
