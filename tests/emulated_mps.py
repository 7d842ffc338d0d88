"""The MPS backend on CPU tensors: its own host code and shader, run by the Metal emulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import build_config
import metal_emulator
import torch
from embed_shader import write_header

from torch_ropepool import selftest

ROOT = build_config.ROOT
SHADER = ROOT / build_config.SHADER_HEADER


def build(*, set_arg_bytes: bool = False) -> Path:
    """The library that a Mac's build has, without the CPU's part. set_arg_bytes: as with torch 2.14."""
    write_header(SHADER)
    sources = [
        *build_config.COMMON_SOURCES,
        *build_config.GPU_SOURCES,
        build_config.METAL / "rope_pool_mps.cpp",
    ]
    target = build_config.TORCH_TARGET_VERSION
    return metal_emulator.build_host_library(
        [ROOT / source for source in sources],
        name="rope_pool_mps_2_14" if set_arg_bytes else "rope_pool_mps",
        flags=[f"-I{SHADER.parent}", "-ffp-contract=off", f"-DTORCH_TARGET_VERSION={target}"],
        depends=[SHADER],
        set_arg_bytes=set_arg_bytes,
    )


@cache
def load(*, set_arg_bytes: bool = False) -> None:
    """Registers the kernels: once in a process, in one of the two forms."""
    metal_emulator.load(build(set_arg_bytes=set_arg_bytes))


def call_kernel(op: str, args: dict[str, Any]) -> Any:
    """The op's MPS kernel. Not recorded: nothing is watched."""
    load()
    return getattr(torch.ops.ropepool, op).default._op_dk(torch._C.DispatchKey.MPS, **args)


def call(op: str, args: dict[str, Any], *, seed: int = 1, **options: Any) -> Any:
    """The op's MPS kernel, watched: raises metal_emulator.Fault for whatever it does wrong."""
    load()
    with metal_emulator.recording(seed, **options):
        return call_kernel(op, args)


def slots_are_distinct(args: dict[str, Any]) -> bool:
    stored = Counter(slot for slot in args["slots"].tolist() if slot >= 0)
    return all(count == 1 for count in stored.values())


def is_huge(args: dict[str, Any]) -> bool:
    return any(isinstance(t, torch.Tensor) and t.untyped_storage().nbytes() > 2**28 for t in args.values())


def checked(op: str) -> Callable[..., Any]:
    """In place of `torch.ops.ropepool.<op>`: on the emulator, in several orders of its threads, and
    every bit that is returned or left in memory compared with the CPU kernel's."""

    def run(*tensors: torch.Tensor, **kwargs: Any) -> Any:
        args = {**dict(zip(selftest.TENSORS, tensors, strict=False)), **kwargs}
        case = selftest.Case("", "", args)
        # Two threads of a GPU may store to one row. The kernel is right then, the row is a mix.
        if slots_are_distinct(args) and not is_huge(args):
            want = selftest.results(case, op, "cpu")
            got = selftest.results(case, op, "cpu", partial(call, seed=1))
            for name in want:
                assert selftest.same_bits(got[name], want[name]), name
        return call(op, args, seed=2)

    return run
