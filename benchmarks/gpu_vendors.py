"""Other projects' CUDA kernels as peers of the GPU benchmark: FlashInfer's, sglang's, vLLM's.

Nothing of theirs is here: gpu_flashinfer.cu, gpu_sglang.cu and gpu_vllm.cu are built against the sources of a
checkout. Not timed is what an engine makes once for all layers or for all steps: tables of cosines and
sines, index arrays, int64 positions.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from common import DTYPES, ROPE_BASE
from gpu_peers import MAX_POSITION, Inputs, Peer, Problem, nvcc
from torch import Tensor

FAST_MATH_TOLERANCE = 6e-2  # of a head, relative: powers and sines of fast math, angles up to MAX_POSITION
JIT = "python/sglang/kernels/jit"


@dataclass(frozen=True)
class Kernel:
    """What becomes a peer for each form. Candidates are by name the wrapper's arguments."""

    name: str
    candidates: dict[str, tuple[int, ...]]
    forms: tuple[str, ...] = ("in place",)
    fast_math: bool = False


@dataclass(frozen=True)
class Vendor:
    name: str
    folders: tuple[str, ...]  # of a checkout, that its headers are in
    flags: tuple[str, ...]  # for nvcc; {arch} stands for 90 and the like
    dtypes: tuple[str, ...]  # that its kernels are published for
    table_dtype: torch.dtype | None  # of cosines and sines; None: q's
    kernels: tuple[Kernel, ...]

    @property
    def stem(self) -> str:
        """Of the wrapper's file, and the option."""
        return self.name.lower()


_APPEND = {"one request": 1, "a request a token": 0}
_FORMS = ("fresh", "in place")
_UNUSED_DROPPED = "-fvisibility=hidden,-ffunction-sections,-fdata-sections"

VENDORS = (
    Vendor(
        "FlashInfer",
        folders=("include",),
        flags=("-std=c++17", "-use_fast_math"),
        dtypes=("bfloat16", "float16"),
        table_dtype=torch.float32,
        kernels=(
            Kernel("FlashInfer", {k: (1, v) for k, v in _APPEND.items()}, _FORMS, fast_math=True),
            Kernel("FlashInfer, cos/sin cached", {k: (0, v) for k, v in _APPEND.items()}, _FORMS),
        ),
    ),
    Vendor(
        "sglang",
        folders=(JIT, f"{JIT}/include"),
        flags=("-std=c++20", "--expt-relaxed-constexpr", "-DSGL_CUDA_ARCH={arch}0"),
        dtypes=tuple(DTYPES),
        table_dtype=torch.float32,
        kernels=(
            Kernel("sglang, cos/sin cached", {"": (0,)}),
            Kernel("sglang, cos/sin cached, overlapping launches", {"": (1,)}),
        ),
    ),
    Vendor(
        "vLLM",
        folders=("csrc",),
        flags=(
            *("-std=c++20", "--expt-relaxed-constexpr", "-DENABLE_FP8", "-DUSE_CUDA"),
            *("-DTORCH_TARGET_VERSION=0x020b000000000000", "-Xcompiler", _UNUSED_DROPPED),
            *("-Xlinker", "--gc-sections"),
        ),
        dtypes=tuple(DTYPES),
        table_dtype=None,
        kernels=(Kernel("vLLM, cos/sin cached", {"": ()}),),
    ),
)


# ---- Calls


class Args(ctypes.Structure):
    """Of gpu_vendors.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "q_out", "k_out", "k_pool", "v_pool")),
        *((name, ctypes.c_void_p) for name in ("cos_sin", "positions", "slots", "positions_64", "slots_64")),
        *((name, ctypes.c_void_p) for name in ("zeros", "ones", "count", "ends")),
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_qo_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("itemsize", "is_bfloat16")),
        ("rope_base", ctypes.c_float),
    ]


@cache
def cos_sin_table(head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[MAX_POSITION + 1, head_dim]: cosines in the first half of a row, sines in the second."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    angles = torch.arange(MAX_POSITION + 1, device=device)[:, None] * ROPE_BASE**-exponents
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)


@cache
def index_arrays(num_tokens: int, device: torch.device) -> tuple[Tensor, ...]:
    """zeros, ones, count and ends."""
    zeros, ones = (torch.full((num_tokens,), n, dtype=torch.int32, device=device) for n in (0, 1))
    count = torch.arange(num_tokens + 1, dtype=torch.int32, device=device)
    return zeros, ones, count, torch.tensor([0, num_tokens], dtype=torch.int32, device=device)


class Wrapper:
    """A vendor's wrapper, built."""

    def __init__(self, vendor: Vendor, library: Path) -> None:
        self.vendor = vendor
        self._function = ctypes.CDLL(str(library)).rope_pool

    def call(self, x: Inputs, *, choices: tuple[int, ...], in_place: bool) -> tuple[Tensor, Tensor]:
        num_tokens, num_qo_heads, head_dim = x.q.shape
        q_out, k_out = (x.q, x.k) if in_place else (torch.empty_like(x.q), torch.empty_like(x.k))
        tensors = [x.q, x.k, x.v, q_out, k_out, x.k_pool, x.v_pool]
        tensors.append(cos_sin_table(head_dim, self.vendor.table_dtype or x.q.dtype, x.q.device))
        tensors += [x.positions, x.slots, x.long_positions, x.long_slots]
        tensors += index_arrays(num_tokens, x.q.device)
        sizes = (num_tokens, num_qo_heads, x.k.shape[1], head_dim, x.q.itemsize)
        args = Args(*[t.data_ptr() for t in tensors], *sizes, x.q.dtype == torch.bfloat16, ROPE_BASE)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = self._function(ctypes.byref(args), *choices, stream)
        if status != 0:
            raise RuntimeError(f"CUDA error {status}")
        return q_out, k_out

    def peers(self, problem: Problem) -> list[Peer]:
        if problem.dtype not in self.vendor.dtypes:
            return []
        exact = 2 * torch.finfo(DTYPES[problem.dtype]).eps  # tables are rounded to this dtype or finer
        return [
            Peer(
                f"{kernel.name}, {form}",
                form == "in place",
                {
                    name: partial(self.call, choices=choices, in_place=form == "in place")
                    for name, choices in kernel.candidates.items()
                },
                FAST_MATH_TOLERANCE if kernel.fast_math else exact,
            )
            for kernel in self.vendor.kernels
            for form in kernel.forms
        ]


# ---- Building


class Builds:
    """Wrappers that compile while other things do. Those without a checkout are only noted."""

    def __init__(
        self, checkouts: dict[str, Path | None], includes: Sequence[Path], folder: Path, arch: str
    ) -> None:
        self._folder = folder
        self._checkouts = checkouts
        self._running: dict[str, subprocess.Popen[str]] = {}
        for vendor in VENDORS:
            checkout = checkouts.get(vendor.stem)
            if checkout is not None:
                paths = [*(checkout / own for own in vendor.folders), *includes, *_torch_includes()]
                flags = [flag.format(arch=arch.removeprefix("sm_")) for flag in vendor.flags]
                flags += [f"-I{path}" for path in paths]
                self._running[vendor.stem] = nvcc(folder, f"gpu_{vendor.stem}", arch, *flags)

    def finish(self, dtypes: Sequence[str], notes: list[str]) -> list[Wrapper]:
        """What could be built. What is not run, and why, goes to the notes."""
        wrappers = []
        for vendor in VENDORS:
            if vendor.stem not in self._running:
                notes.append(f"not run: {vendor.name}'s kernels: no --{vendor.stem} was given")
                continue
            process = self._running[vendor.stem]
            _, messages = process.communicate()
            if process.returncode != 0:
                errors = [line for line in messages.splitlines() if "error" in line]
                why = (errors or [f"nvcc returned {process.returncode}"])[0]
                notes.append(f"not run: {vendor.name}'s kernels: they do not build: {why}")
                continue
            try:
                wrappers.append(Wrapper(vendor, self._folder / f"gpu_{vendor.stem}.so"))
            except OSError as error:
                notes.append(f"not run: {vendor.name}'s kernels: they do not load: {error}")
                continue
            for dtype in dtypes:
                if dtype not in vendor.dtypes:
                    notes.append(f"not run: {vendor.name}'s kernels, {dtype}: not published for it")
        return wrappers


def _torch_includes() -> list[str]:
    from torch.utils.cpp_extension import include_paths

    return list(include_paths())
