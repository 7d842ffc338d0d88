"""The library with the CUDA kernels, as nvcc built it; no GPU is needed."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import torch

from torch_ropepool._library import cuda_library_path

needs_nvcc = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="no nvcc here, so no CUDA library is built"
)


def symbols(*flags: str) -> list[str]:
    result = subprocess.run(
        ["nm", "-D", *flags, str(cuda_library_path())], capture_output=True, text=True, check=True
    )
    return [line.split()[-1] for line in result.stdout.splitlines()]


@needs_nvcc
def test_it_is_built_where_nvcc_is():
    assert cuda_library_path().exists()


@needs_nvcc
def test_it_uses_torch_only_through_its_c_shim():
    """So it serves every torch >= 2.10 with CUDA, whatever the C++ ABI."""
    of_torch = [name for name in symbols("--undefined-only") if re.search("torch|c10|at::|_ZN2at", name)]
    assert of_torch
    assert [name for name in of_torch if not name.startswith(("aoti_torch_", "torch_"))] == []
    assert "aoti_torch_get_current_cuda_stream" in of_torch


@needs_nvcc
def test_it_brings_its_own_cuda_runtime():
    needed = subprocess.run(
        ["readelf", "-d", str(cuda_library_path())], capture_output=True, text=True, check=True
    ).stdout
    assert "libcudart" not in needed
    assert "libtorch.so" in needed  # by way of which a torch with CUDA gives its stream


@needs_nvcc
def test_it_holds_code_for_each_architecture():
    image = cuda_library_path().read_bytes()
    for kind in (b"sm_80", b"sm_90", b"compute_90"):
        assert kind in image


def test_a_torch_without_cuda_does_not_load_it():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("ropepool::_rope_pool_fused", "CUDA")
    assert has_kernel == (torch.version.cuda is not None and cuda_library_path().exists())
