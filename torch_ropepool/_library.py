"""Finds and loads the compiled library. Whatever is wrong with it becomes one ImportError."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import torch

from ._version import __version__

OLDEST_TORCH = (2, 10)
REBUILD = (
    "build it for this machine and torch: "
    "pip install --no-build-isolation --force-reinstall --no-deps torch_ropepool"
)
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")


def library_path() -> Path:
    """The compiled library, for C++ programs that load or link it. It lies beside the package."""
    return Path(__file__).with_name("librope_pool" + SUFFIX)


def cuda_library_path() -> Path:
    """The library with the CUDA kernels, there if it was built with nvcc. Load it after the other."""
    return Path(__file__).with_name("librope_pool_cuda" + SUFFIX)


def load() -> ctypes.CDLL:
    """Loads the library, which registers the ops. Raises ImportError with what to do."""
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if match and (int(match[1]), int(match[2])) < OLDEST_TORCH:
        raise ImportError(
            f"torch_ropepool needs torch >= 2.10, found {torch.__version__}: pip install 'torch>=2.10'"
        )
    path = library_path()
    if not path.exists():
        raise ImportError(f"torch_ropepool's compiled library is missing ({path}): {REBUILD}")
    try:
        torch.ops.load_library(path)
        if torch.version.cuda is not None and cuda_library_path().exists():
            torch.ops.load_library(cuda_library_path())
    except OSError as error:
        raise ImportError(f"torch_ropepool's compiled library does not load ({error}): {REBUILD}") from error
    library = ctypes.CDLL(str(path))
    library.rope_pool_version.restype = ctypes.c_char_p
    library.rope_pool_cpu_isa.restype = ctypes.c_char_p
    built_as = library.rope_pool_version().decode()
    if built_as != __version__:
        raise ImportError(
            f"torch_ropepool is {__version__}, but its compiled library ({path}) is {built_as}: {REBUILD}"
        )
    return library


LIBRARY = load()
