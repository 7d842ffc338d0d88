"""No byte beyond a tensor is read or written: every tensor lies at a page that cannot be accessed."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest
import torch
from checks import check
from sample import OPS, Sample, make_sample
from test_rope_pool import DTYPES, instruction_sets, run_python
from torch import Tensor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mprotect by way of ctypes")

HEAD_DIMS = (2, 64, 72, 80, 128, 264)  # the last has more pairs than one tile of angles
LIBC = ctypes.CDLL(None, use_errno=True)
PROT_NONE = 0


def guarded(t: Tensor, where: str) -> Tensor:
    """The same values and strides, in pages of their own between two that cannot be accessed.

    where: "end" if its last byte is the last before such a page, "begin" if its first is the first after.
    """
    count = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    num_bytes = count * t.itemsize
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, size + 2 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    for page in (address, address + mmap.PAGESIZE + size):
        if LIBC.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = mmap.PAGESIZE + (size - num_bytes if where == "end" else 0)
    flat = torch.frombuffer(pages, dtype=t.dtype, count=count, offset=offset)
    return flat.as_strided(t.shape, t.stride()).copy_(t)


def spread(t: Tensor) -> Tensor:
    """The same values, two elements apart."""
    return torch.stack([t, t], dim=-1)[..., 0]


def transposed(t: Tensor) -> Tensor:
    """The same values, features the slowest in memory."""
    return t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim())))


def calls() -> list[Sample]:
    """In every dtype, head_dim and form of the kernel."""
    result = []
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            call = make_sample(5, 3, 2, head_dim, pool_size=5, dtype=dtype)
            odd = make_sample(3, 1, 1, head_dim, pool_size=3, dtype=dtype, index_dtype=torch.int64)
            wide = call.positions.long() << 40
            result += [call, odd, call.with_(interleaved=True), call.with_(positions=wide)]
            # The first feature that does not turn is at no multiple of a vector.
            result += [call.with_(rotary_dim=max(2, head_dim // 2 - 2))]
            inv_freq = torch.logspace(0, -4, head_dim // 2)
            result += [call.with_(rope_base=None, inv_freq=inv_freq)]
            for strided in (spread, transposed):
                result += [call.map(strided), call.map(strided).with_(interleaved=True)]
    return result


def run_all(where: str) -> None:
    """In this process, which dies of a read or write beyond a tensor."""
    count = 0
    for call in calls():
        for op in OPS:
            check(call.map(lambda t: guarded(t, where)), op)
            count += 1
    print(f"{count} calls")


@pytest.mark.parametrize("where", ["end", "begin"])
def test_nothing_beyond_a_tensor_is_touched(where):
    for isa in instruction_sets():
        code = "import sys, torch_ropepool, test_guard_pages as t; t.run_all(sys.argv[1])"
        done = run_python(code, where, isa=isa)
        assert done.returncode == 0, (isa, done.returncode, done.stderr)
        assert done.stdout == f"{len(calls()) * len(OPS)} calls\n"


@pytest.mark.parametrize(("where", "index"), [("end", 64), ("begin", -1)])
def test_a_byte_beyond_is_a_crash(where, index):
    """The test above can fail."""
    code = (
        "import ctypes, sys, torch, torch_ropepool, test_guard_pages as t\n"
        "x = t.guarded(torch.zeros(64, dtype=torch.uint8), sys.argv[1])\n"
        "print('there', flush=True)\n"
        "ctypes.string_at(x.data_ptr() + int(sys.argv[2]), 1)\n"
        "print('still there')"
    )
    done = run_python(code, where, str(index), isa="")
    assert done.stdout == "there\n"
    assert done.returncode != 0
