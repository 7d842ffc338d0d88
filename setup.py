"""Builds the compiled libraries. Everything else is in pyproject.toml."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

try:
    from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths, library_paths
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

MACOS = sys.platform == "darwin"
CSRC = Path("torch_ropepool/csrc")
METAL = Path("torch_ropepool/metal")
GENERATED = Path("build/generated")
CUDA_LIBRARY = "torch_ropepool.librope_pool_cuda"
CUDA_ARCHITECTURES = ("sm_80", "sm_90", "compute_90")  # the last is PTX, for what comes later

# What every library with kernels is made of.
COMMON_SOURCES = [
    CSRC / "contract.cpp",
    CSRC / "frequency_table.cpp",
    CSRC / "overlap.cpp",
    CSRC / "rope_pool_plan.cpp",
    CSRC / "tensor_args.cpp",
]
SOURCES = [
    *COMMON_SOURCES,
    CSRC / "c_api.cpp",
    CSRC / "cpu/rope_pool_cpu.cpp",
    CSRC / "cpu/rope_pool_isa.cpp",
    CSRC / "library.cpp",
    CSRC / "refusals.cpp",
]
GPU_SOURCES = [CSRC / "gpu_tables.cpp"]
if MACOS:
    SOURCES += [*GPU_SOURCES, METAL / "rope_pool_mps.cpp"]
    runpy.run_path(str(ROOT / "tools/embed_shader.py"))["write_header"](
        ROOT / GENERATED / "rope_pool_shader.h"
    )

MACROS = {"TORCH_TARGET_VERSION": TORCH_TARGET_VERSION, "ROPE_POOL_VERSION": f'"{VERSION}"'}
COMPILE_ARGS = (
    ["/O2", "/std:c++17", "/fp:precise"]
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
    ]
)


def cuda_compiler() -> str | None:
    """nvcc, or None where the CUDA library is not to be built. TORCH_ROPEPOOL_CUDA=0 or 1 decides."""
    wanted = os.environ.get("TORCH_ROPEPOOL_CUDA", "")
    if wanted not in ("", "0", "1"):
        sys.exit(f"TORCH_ROPEPOOL_CUDA must be 0 or 1, got {wanted}")
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    if wanted == "1" and nvcc is None:
        sys.exit("TORCH_ROPEPOOL_CUDA=1, but there is no nvcc in PATH or CUDA_HOME")
    if wanted == "0" or nvcc is None or not sys.platform.startswith("linux"):
        print(f"torch_ropepool: no CUDA kernels ({'not wanted' if wanted == '0' else 'no nvcc here'})")
        return None
    return nvcc


def build_cuda_library(nvcc: str, output: Path) -> None:
    """Needs neither a GPU nor a torch with CUDA. Not torch's CUDAExtension, which needs that torch."""
    sources = [*COMMON_SOURCES, *GPU_SOURCES, CSRC / "cuda/rope_pool_cuda.cu"]
    newest = max(path.stat().st_mtime for path in [Path(__file__), *CSRC.rglob("*.*")])
    if output.exists() and output.stat().st_mtime > newest:
        return
    host_flags = [flag for flag in COMPILE_ARGS if flag.startswith("-f")]
    command = [nvcc, "-shared", "-O3", "-std=c++17", "-fmad=false", "-cudart=static", "-o", str(output)]
    command += ["-t", "0", "-Xcompiler", ",".join(["-fPIC", *host_flags])]
    for architecture in CUDA_ARCHITECTURES:
        number = architecture.split("_")[1]
        command += ["-gencode", f"arch=compute_{number},code={architecture}"]
    command += [f"-D{name}={value}" for name, value in MACROS.items()] + ["-DUSE_CUDA"]
    command += [f"-I{path}" for path in include_paths()] + [str(path) for path in sources]
    # By way of libtorch.so what only a torch with CUDA has is found as well.
    command += [f"-L{path}" for path in library_paths()] + ["-Xlinker", "--no-as-needed"]
    command += ["-ltorch", "-ltorch_cpu", "-lc10"]
    print(" ".join(command))
    output.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(command, check=True)


class BuildLibrary(BuildExtension):
    """A plain shared library beside the package, no Python module."""

    def get_ext_filename(self, ext_name: str) -> str:
        suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
        return str(Path(*ext_name.split("."))) + suffix

    def get_export_symbols(self, ext):
        return []  # no PyInit function

    def run(self) -> None:
        super().run()
        nvcc = cuda_compiler()
        if nvcc is not None:
            build_cuda_library(nvcc, Path(self.get_ext_fullpath(CUDA_LIBRARY)))


class PlatformWheel(bdist_wheel):
    """The library holds no Python: one wheel per platform serves every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        CppExtension(
            "torch_ropepool.librope_pool",
            [str(source) for source in SOURCES],
            py_limited_api=True,  # link no Python
            define_macros=list(MACROS.items()),
            include_dirs=[str(ROOT / GENERATED)],
            extra_compile_args=COMPILE_ARGS,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
