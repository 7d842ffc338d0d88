"""The Metal emulator tells good shaders and host code from bad ones."""

from __future__ import annotations

import ctypes
import random
import subprocess
import textwrap
from pathlib import Path

import metal_emulator as emulator
import numpy as np
import pytest
import torch
from metal_emulator import CompileError, Fault, run_kernel, shim
from metal_emulator.compiler import CXX

import torch_ropepool

CSRC = Path(torch_ropepool.__file__).parent / "csrc"
HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
STRICT = HEADER + "#pragma METAL fp math_mode(safe)\n#pragma METAL fp contract(off)\n"
SEEDS = [0, 1, 2]


def shader(text: str, header: str = HEADER) -> str:
    return header + textwrap.dedent(text)


# ---- rope_math.h gives the bits that it gives in C++

MATH = (CSRC / "rope_math.h").read_text()
# Each function on rows of integers: one text for both languages.
MATH_CALLS = {
    "phase32_": ("int", "uint", "phase32(x[0], (u32)x[1], (u32)x[2])", 1),
    "angle_": ("int", "uint", "bits_of(angle_of((u32)x[0]).cos), bits_of(angle_of((u32)x[0]).sin)", 2),
    "frequency_": (
        "int",
        "uint",
        "frequency_of(float_of((u32)x[0])).high, frequency_of(float_of((u32)x[0])).low, "
        "(u32)frequency_of(float_of((u32)x[0])).tail",
        3,
    ),
    "phase64_": (
        "long",
        "uint",
        "(u32)phase64(x[0], Frequency{(u32)x[1], (u32)x[2], (i32)x[1]}), "
        "(u32)(phase64(x[0], Frequency{(u32)x[1], (u32)x[2], (i32)x[1]}) >> 32), "
        "phase_of(x[0], Frequency{(u32)x[1], (u32)x[2], (i32)x[1]})",
        3,
    ),
    **{
        f"rotate_{element}": (
            "int",
            "uint",
            f"turned<{element}>(x).first, turned<{element}>(x).second",
            2,
        )
        for element in ("Float32Bits", "BFloat16", "Float16")
    },
}
MATH_HELPERS = """
namespace rope_pool {
// float32 by its bits, so that all types are called alike
struct Float32Bits {
  typedef u32 storage;
  typedef float compute;
  static ROPE_POOL_FN float load(u32 x) { return float_of(x); }
  static ROPE_POOL_FN u32 store(float x) { return bits_of(x); }
};
template <class Element, class Row>
ROPE_POOL_FN Pair<Element> turned(Row x) {
  Angle<float> angle = angle_of((u32)x[2]);
  return rotate<Element>((typename Element::storage)x[0], (typename Element::storage)x[1], angle.cos, angle.sin);
}
}  // namespace rope_pool
"""


def math_functions(head: str) -> str:
    """`head` makes one function's head of its name and types."""
    functions = [
        head.format(name=name, In=in_, Out=out)
        + f"  {in_} x[3] = {{in[3 * id], in[3 * id + 1], in[3 * id + 2]}};\n"
        + f"  {out} y[{count}] = {{{values}}};\n"
        + f"  for (int i = 0; i < {count}; ++i) out[{count} * id + i] = y[i];\n}}\n"
        for name, (in_, out, values, count) in MATH_CALLS.items()
    ]
    return "\n".join(functions)


METAL_MATH = (
    STRICT
    + MATH
    + MATH_HELPERS
    + "using namespace rope_pool;\n"
    + math_functions(
        "kernel void {name}(device const {In}* in [[buffer(0)]], device {Out}* out [[buffer(1)]],\n"
        "                   uint id [[thread_position_in_grid]]) {{\n"
    )
)
CPP_MATH = (
    '#include "rope_math.h"\ntypedef unsigned int uint;\n'
    + MATH_HELPERS
    + "using namespace rope_pool;\n"
    + math_functions('extern "C" void {name}(const {In}* in, {Out}* out, uint id) {{\n')
)


@pytest.fixture(scope="module")
def cpp_math(tmp_path_factory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("math")
    (folder / "math.cpp").write_text(CPP_MATH)
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-Wno-narrowing", f"-I{CSRC}"]
    subprocess.run([CXX, *flags, "math.cpp", "-o", "math.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "math.so"))


def math_rows(name: str) -> torch.Tensor:
    numbers = random.Random(name)
    wide = MATH_CALLS[name][0] == "long"
    bits = 64 if wide else 32
    edges = [0, 1, -1, 2**31 - 1, -(2**31), 0x20000000, 0x1FFFFFFF, 0x7F7FFFFF, 0x00800000, 0x007FFFFF]
    row = lambda: [numbers.randrange(-(2 ** (bits - 1)), 2 ** (bits - 1)) for _ in range(3)]
    rows = [[edge, *row()[1:]] for edge in edges] + [row() for _ in range(3000)]
    if name == "frequency_":  # of finite numbers only
        rows = [[x & ~0x00800000 if (x >> 23) & 0xFF == 0xFF else x, 0, 0] for x, _, _ in rows]
    return torch.tensor(rows, dtype=torch.int64 if wide else torch.int32)


def is_nan(name: str, values: torch.Tensor) -> torch.Tensor:
    if name.endswith("Float32Bits"):
        return values.view(torch.float32).isnan()
    if name.endswith("Float16"):
        return values.short().view(torch.bfloat16 if name.endswith("BFloat16") else torch.float16).isnan()
    return torch.zeros_like(values, dtype=torch.bool)


@pytest.mark.parametrize("name", MATH_CALLS)
def test_rope_math_gives_the_bits_of_cpp(cpp_math, name):
    rows = math_rows(name)
    shape = (len(rows), MATH_CALLS[name][3])
    got, want = torch.empty(shape, dtype=torch.int32), torch.empty(shape, dtype=torch.int32)
    for i in range(len(rows)):
        getattr(cpp_math, name)(ctypes.c_void_p(rows.data_ptr()), ctypes.c_void_p(want.data_ptr()), i)
    run = run_kernel(METAL_MATH, name, [rows, got], len(rows), uninitialised=[got])
    same = (got == want) | (is_nan(name, got) & is_nan(name, want))  # which NaN is nobody's promise
    assert same.all(), (rows[~same.all(1)], got[~same.all(1)], want[~same.all(1)])
    buffers = run.dispatches[0].buffers
    assert buffers[0].bytes_loaded == rows.nbytes and buffers[1].bytes_stored == got.nbytes
