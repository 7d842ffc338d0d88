"""Builds the compiled libraries. Everything else is in pyproject.toml."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup

if sys.platform == "win32":
    sys.exit("torch_ropepool does not run on Windows: use it in WSL, the Windows Subsystem for Linux")
try:
    from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths, library_paths
except ImportError:
    sys.exit(
        "torch_ropepool is built against the torch that is installed, and there is none.\n"
        "Install torch >= 2.10 and ninja, then run: pip install --no-build-isolation ."
    )

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tools"))  # pip's build backend does not have the folder there

import build_config  # noqa: E402
from embed_shader import write_header  # noqa: E402

COMPILE_ARGS = build_config.compile_args()
SANITIZER_ARGS = build_config.sanitizer_args(sys.platform)
CUDA_LIBRARY = "torch_ropepool.librope_pool_cuda"
CUDA_ARCHITECTURES = ("sm_80", "sm_90", "compute_90")  # the last is PTX, for what comes later


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
    csrc = build_config.CSRC
    sources = [*build_config.COMMON_SOURCES, *build_config.GPU_SOURCES, csrc / "cuda/rope_pool_cuda.cu"]
    build_files = [Path(__file__), Path(build_config.__file__)]
    newest = max(path.stat().st_mtime for path in [*build_files, *csrc.rglob("*.*")])
    if output.exists() and output.stat().st_mtime > newest:
        return
    host_flags = [flag for flag in COMPILE_ARGS if flag.startswith("-f")]
    command = [nvcc, "-shared", "-O3", "-std=c++17", "-fmad=false", "-cudart=static", "-o", str(output)]
    command += ["-t", "0", "-Xcompiler", ",".join(["-fPIC", *host_flags])]
    for architecture in CUDA_ARCHITECTURES:
        number = architecture.split("_")[1]
        command += ["-gencode", f"arch=compute_{number},code={architecture}"]
    command += [f"-D{name}={value}" for name, value in build_config.MACROS.items()] + ["-DUSE_CUDA"]
    command += [f"-I{path}" for path in include_paths()] + [str(path) for path in sources]
    # By way of libtorch.so what only a torch with CUDA has is found as well.
    command += [f"-L{path}" for path in library_paths()] + ["-Xlinker", "--no-as-needed"]
    command += ["-ltorch", "-ltorch_cpu", "-lc10"]
    print(" ".join(command))
    output.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(command, check=True)


class BuildLibrary(BuildExtension):
    def get_ext_filename(self, ext_name: str) -> str:
        return build_config.library_filename(ext_name, sys.platform)

    def get_export_symbols(self, ext):
        return []  # no PyInit function

    def run(self) -> None:
        super().run()
        nvcc = cuda_compiler()
        if nvcc is not None:
            build_cuda_library(nvcc, Path(self.get_ext_fullpath(CUDA_LIBRARY)))


if sys.platform == "darwin":
    write_header(ROOT / build_config.SHADER_HEADER)

setup(
    ext_modules=[
        CppExtension(
            build_config.LIBRARY,
            [str(source) for source in build_config.sources(sys.platform)],
            py_limited_api=True,  # link no Python
            define_macros=list(build_config.MACROS.items()),
            include_dirs=[str(ROOT / build_config.SHADER_HEADER.parent)],
            extra_compile_args=COMPILE_ARGS + SANITIZER_ARGS,
            extra_link_args=SANITIZER_ARGS,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": build_config.PlatformWheel},
)
