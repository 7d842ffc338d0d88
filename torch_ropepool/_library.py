"""Finds and loads the compiled library. Whatever is wrong with it becomes one ImportError."""

from __future__ import annotations

import ctypes
import os
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
SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


def library_path() -> Path:
    """The compiled library, for C++ programs that load or link it. It lies beside the package."""
    return Path(__file__).with_name("librope_pool" + SUFFIX)


def cuda_library_path() -> Path:
    """The library with the CUDA kernels, there if it was built with nvcc. Load it after the other."""
    return Path(__file__).with_name("librope_pool_cuda" + SUFFIX)


def load() -> ctypes.CDLL:
    """Loads the library, which registers the ops. Raises ImportError with what to do."""
    if sys.platform == "win32":
        raise ImportError(
            "torch_ropepool does not run on Windows: use it in WSL, the Windows Subsystem for Linux"
        )
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if match and (int(match[1]), int(match[2])) < OLDEST_TORCH:
        raise ImportError(
            f"torch_ropepool needs torch >= 2.10, found {torch.__version__}: pip install 'torch>=2.10'"
        )
    path = library_path()
    if not path.exists():
        raise ImportError(f"torch_ropepool's compiled library is missing ({path}): {REBUILD}")
    if torch._C._dispatch_has_kernel("ropepool::rope_pool_fused") and not _is_loaded(path):
        raise ImportError(
            "this process has loaded another copy of torch_ropepool's compiled library already, "
            f"so it cannot load {path}: import one copy only"
        )
    library = _load(path)
    if torch.version.cuda is not None and cuda_library_path().exists():
        _load(cuda_library_path())
    library.rope_pool_cpu_isa.restype = ctypes.c_char_p
    return library


def _is_loaded(path: Path) -> bool:
    try:
        ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def _load(path: Path) -> ctypes.CDLL:
    """Loads a library, and asks it for its version."""
    try:
        torch.ops.load_library(path)
    except OSError as error:
        why = error.__cause__ or error  # newer versions of torch say why in the cause
        raise ImportError(f"torch_ropepool's compiled library does not load ({why}): {REBUILD}") from error
    library = ctypes.CDLL(str(path))
    try:
        library.rope_pool_version.restype = ctypes.c_char_p
    except AttributeError as error:
        raise ImportError(f"{path} is not torch_ropepool's compiled library: {REBUILD}") from error
    built_as = library.rope_pool_version().decode()
    if built_as != __version__:
        raise ImportError(
            f"torch_ropepool is {__version__}, but its compiled library ({path}) is {built_as}: {REBUILD}"
        )
    return library


LIBRARY = load()
