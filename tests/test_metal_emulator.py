"""The Metal emulator tells good shaders and host code from bad ones."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
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
    **{
        f"word_of_{element}": (
            "int",
            "uint",
            f"WordOf<{element}>::store(float_of((u32)x[0]), float_of((u32)x[1])), "
            f"bits_of(WordOf<{element}>::low((u32)x[2])), bits_of(WordOf<{element}>::high((u32)x[2]))",
            3,
        )
        for element in ("BFloat16", "Float16")
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
ROPE_POOL_FN Pair<typename Element::storage> turned(Row x) {
  Angle<float> angle = angle_of((u32)x[2]);
  return rotate_stored<Element>((typename Element::storage)x[0], (typename Element::storage)x[1], angle.cos, angle.sin);
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
    rows = [[numbers.randrange(-(2 ** (bits - 1)), 2 ** (bits - 1)) for _ in range(3)] for _ in range(3000)]
    rows += [[edge, *row[1:]] for edge, row in zip(edges, rows, strict=False)]
    if name == "frequency_":  # of finite numbers only
        rows = [[x & ~0x00800000 if (x >> 23) & 0xFF == 0xFF else x, 0, 0] for x, _, _ in rows]
    return torch.tensor(rows, dtype=torch.int64 if wide else torch.int32)


def is_nan(name: str, values: torch.Tensor) -> torch.Tensor:
    if name.endswith("Float32Bits"):
        return values.view(torch.float32).isnan()
    if name.startswith("rotate_"):
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


# ---- Good shaders, as Apple documents Metal

FLOAT_TYPES = {"float": torch.float32, "half": torch.float16, "bfloat": torch.bfloat16}

TEMPLATE = shader(
    """
    template <class T>
    kernel void axpy(device const T* x [[buffer(0)]], device T* y [[buffer(1)]],
                     constant long& n [[buffer(2)]], uint id [[thread_position_in_grid]]) {
      if (id < n) y[id] = y[id] + x[id] * T(2);
    }
    #define INSTANTIATE(T)                                                                   \\
      template [[host_name("axpy_" #T)]] kernel void axpy<T>(                                \\
          device const T* x [[buffer(0)]], device T* y [[buffer(1)]],                        \\
          constant long& n [[buffer(2)]], uint id [[thread_position_in_grid]]);
    INSTANTIATE(float)
    INSTANTIATE(half)
    INSTANTIATE(bfloat)
    template [[host_name("axpy_short")]] [[kernel]] decltype(axpy<short>) axpy<short>;
    """
)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FLOAT_TYPES)
def test_template_with_host_names(name, seed):
    x, y = torch.randn(2, 100).to(FLOAT_TYPES[name])
    want = y + x * 2
    run = run_kernel(TEMPLATE, f"axpy_{name}", [x, y, 100], 128, 32, seed=seed)
    assert torch.equal(y, want)
    (dispatch,) = run.dispatches
    assert (dispatch.grid, dispatch.group) == ((128, 1, 1), (32, 1, 1))
    assert dispatch.buffer("x").bytes_loaded == dispatch.buffer("y").bytes_stored == x.nbytes
    assert dispatch.buffer("n").bytes_loaded == 128 * 8
    assert dispatch.calls["axpy"] == 128


def test_instantiation_by_decltype():
    x, y = torch.arange(8, dtype=torch.int16), torch.ones(8, dtype=torch.int16)
    run_kernel(TEMPLATE, "axpy_short", [x, y, 8], 8)
    assert torch.equal(y, 1 + 2 * torch.arange(8, dtype=torch.int16))


STRUCTS = shader(
    """
    namespace rows {
    struct Layout {
      long stride;
      int columns;
      ushort factors[2];
    };
    struct Row {  // made by the thread, of pointers to device memory
      device const int* from;
      device int* to;
    };
    inline Row row_of(device const int* from, device int* to, constant Layout& layout, uint row) {
      Row r;
      r.from = from + row * layout.stride;
      r.to = to + (long)row * layout.columns;
      return r;
    }
    inline void scale(thread const Row& r, int columns, thread int* factor) {
      for (int i = 0; i < columns; ++i) r.to[i] = r.from[i] * *factor;
    }
    kernel void scale_rows(device const int* from [[buffer(0)]], device int* to [[buffer(3)]],
                           constant Layout& layout [[buffer(1)]], device const Layout* all [[buffer(2)]],
                           uint row [[thread_position_in_grid]]) {
      Row r = row_of(from, to, layout, row);
      int factor = layout.factors[1] + all[row].factors[0];
      scale(r, layout.columns, &factor);
    }
    }  // namespace rows
    """
)


def layout_bytes(stride: int, columns: int, *factors: int) -> bytes:
    layout = np.dtype([("stride", "<i8"), ("columns", "<i4"), ("factors", "<u2", 2)])
    return np.array((stride, columns, factors), dtype=layout).tobytes()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("as_bytes", [True, False])
def test_structs_and_namespaces(seed, as_bytes):
    base = torch.arange(6 * 10, dtype=torch.int32)
    from_ = base.view(6, 10)[1:, 2:]  # an offset of 12 elements
    to = torch.empty(5, 8, dtype=torch.int32)
    one = layout_bytes(10, 8, 0, 3)
    layout = one if as_bytes else torch.frombuffer(bytearray(one), dtype=torch.uint8)
    all_ = torch.frombuffer(
        bytearray(b"".join(layout_bytes(0, 0, i, 0) for i in range(5))), dtype=torch.uint8
    )
    run = run_kernel(STRUCTS, "scale_rows", [from_, layout, all_, to], 5, uninitialised=[to], seed=seed)
    assert torch.equal(to, from_ * (3 + torch.arange(5, dtype=torch.int32)[:, None]))
    assert run.dispatches[0].buffer("all").distinct_bytes_loaded == 5 * 2
    assert run.dispatches[0].calls["rows::row_of"] == 5


VECTORS = shader(
    """
    template <class V, class T>
    inline void put(device T* to, V v) { *(device V*)to = v; }

    kernel void swap_ends(device const ushort* from [[buffer(0)]], device ushort* to [[buffer(1)]],
                          uint id [[thread_position_in_grid]]) {
      uint4 v = *(device const uint4*)(from + 8 * id);
      uint4 turned = uint4(v.w, v.zy, v.x);
      put<uint4>(to + 8 * id, turned);
    }
    kernel void mix_types(device const float4* x [[buffer(0)]], device const half4* h [[buffer(1)]],
                          device float2* to [[buffer(2)]], uint id [[thread_position_in_grid]]) {
      float4 sum = x[id] + float4(h[id].x, h[id].yz, 1.5) * float4(2);
      to[id] = fma(sum.xy, sum.zw, float2(0.5f));
    }
    """
)


@pytest.mark.parametrize("seed", SEEDS)
def test_vector_loads_and_stores(seed):
    from_ = torch.randint(0, 2**15, (20, 8), dtype=torch.int16)
    to = torch.empty_like(from_)
    run = run_kernel(VECTORS, "swap_ends", [from_, to], 20, 7, uninitialised=[to], seed=seed)
    assert torch.equal(to.view(20, 4, 2), from_.view(20, 4, 2).flip(1))
    loads = run.dispatches[0].buffers[0]
    assert loads.bytes_loaded == loads.distinct_bytes_loaded == from_.nbytes


def test_vectors_of_several_types():
    x, h, to = torch.randn(9, 4), torch.randn(9, 4).half(), torch.empty(9, 2)
    run_kernel(VECTORS, "mix_types", [x, h, to], 9, uninitialised=[to])
    sums = x + torch.cat([h[:, :3].float(), torch.full((9, 1), 1.5)], 1) * 2
    assert torch.allclose(to, sums[:, :2] * sums[:, 2:] + 0.5)


HALVES = shader(
    """
    constant float table[] = {0.25, 1e3, -3.0f};
    template <class T>
    kernel void polynomial(device const T* x [[buffer(0)]], device T* y [[buffer(1)]],
                           uint id [[thread_position_in_grid]]) {
      T a = x[id];
      T squared = a * a;
      y[id] = squared * T(table[0]) + a;
    }
    template [[host_name("polynomial_half")]] kernel void polynomial<half>(
        device const half* x [[buffer(0)]], device half* y [[buffer(1)]], uint id [[thread_position_in_grid]]);
    template [[host_name("polynomial_bfloat")]] kernel void polynomial<bfloat>(
        device const bfloat* x [[buffer(0)]], device bfloat* y [[buffer(1)]], uint id [[thread_position_in_grid]]);

    kernel void literals(device float* y [[buffer(0)]]  , uint id [[thread_position_in_grid]]) {
      float third = 1.0 / 3.0;  // float division: Metal's literals are float
      y[0] = third;
      y[1] = 0.1h;
      y[2] = as_type<float>(0x3f800000u) + as_type<half>(ushort(0x3c00));
      y[3] = table[1] + table[2];
      y[4] = sizeof(1.5) + sizeof(long) + sizeof(half3);
    }
    """,
    STRICT,
)


@pytest.mark.parametrize("name", ["half", "bfloat"])
def test_half_types_round_at_each_step(name):
    x = torch.randn(2000).to(FLOAT_TYPES[name])
    y = torch.empty_like(x)
    run = run_kernel(HALVES, f"polynomial_{name}", [x, y], 2000, uninitialised=[y])
    assert torch.equal(y, x * x * 0.25 + x)
    assert run.dispatches[0].constants.bytes_loaded == 2000 * 4


def test_literals_and_bits():
    y = torch.empty(5)
    run_kernel(HALVES, "literals", [y], 1, uninitialised=[y])
    third, tenth = torch.tensor(1.0) / 3, torch.tensor(0.1).half()
    assert y.tolist() == [third.item(), tenth.item(), 2, 997, 4 + 8 + 8]


POSITIONS = shader(
    """
    kernel void positions(device uint* out [[buffer(0)]], uint3 id [[thread_position_in_grid]],
                          uint3 grid [[threads_per_grid]], ushort3 local [[thread_position_in_threadgroup]],
                          uint3 size [[threads_per_threadgroup]], uint3 full [[dispatch_threads_per_threadgroup]],
                          uint3 group [[threadgroup_position_in_grid]], uint3 groups [[threadgroups_per_grid]],
                          uint index [[thread_index_in_threadgroup]], uint2 plane [[thread_position_in_grid]],
                          uint width [[threads_per_simdgroup]]) {
      device uint* row = out + 20 * ((id.z * grid.y + id.y) * grid.x + id.x);
      row[0] = local.x; row[1] = local.y; row[2] = local.z;
      row[3] = size.x; row[4] = size.y; row[5] = size.z;
      row[6] = full.x; row[7] = full.y; row[8] = full.z;
      row[9] = group.x; row[10] = group.y; row[11] = group.z;
      row[12] = groups.x; row[13] = groups.y; row[14] = groups.z;
      row[15] = index; row[16] = plane.x; row[17] = plane.y; row[18] = width; row[19] = 0;
    }
    """
)


@pytest.mark.parametrize("seed", SEEDS)
def test_grid_of_three_dimensions_and_smaller_groups_at_its_edges(seed):
    grid, full = (5, 7, 3), (4, 2, 2)
    out = torch.empty(3, 7, 5, 20, dtype=torch.int32)
    run = run_kernel(POSITIONS, "positions", [out], grid, full, uninitialised=[out], seed=seed)
    for x, y, z in np.ndindex(*grid):
        at = (x, y, z)
        group = [p // n for p, n in zip(at, full, strict=True)]
        local = [p % n for p, n in zip(at, full, strict=True)]
        size = [min(n, g - i * n) for n, g, i in zip(full, grid, group, strict=True)]
        index = (local[2] * size[1] + local[1]) * size[0] + local[0]
        want = [*local, *size, *full, *group, 2, 4, 2, index, x, y, 32, 0]
        assert out[z, y, x].tolist() == want
    assert run.dispatches[0].threads == 105


def test_default_threadgroup_is_torchs():
    out = torch.empty(1, 1, 1500, 20, dtype=torch.int32)
    run_kernel(POSITIONS, "positions", [out], 1500)  # 1024 and a smaller one
    assert out[0, 0, :, 3].tolist() == [1024] * 1024 + [476] * 476


WIDE_INDEX = shader(
    """
    kernel void gather(device const int* from [[buffer(0)]], device int* to [[buffer(1)]],
                       constant long& stride [[buffer(2)]], constant long& start [[buffer(3)]],
                       uint id [[thread_position_in_grid]]) {
      long at = start + (long)id * stride;  // beyond 32 bits on the way
      to[id] = from[at - start * 2 + start];
    }
    kernel void narrow(device const int* from [[buffer(0)]], device int* to [[buffer(1)]],
                       constant long& stride [[buffer(2)]], constant long& start [[buffer(3)]],
                       uint id [[thread_position_in_grid]]) {
      int at = (int)(start + (long)id * stride);
      to[id] = from[at - start];
    }
    """
)


def test_index_arithmetic_of_64_bits():
    from_, to = torch.arange(40, dtype=torch.int32), torch.empty(10, dtype=torch.int32)
    run_kernel(WIDE_INDEX, "gather", [from_, to, 4, 2**33], 10)
    assert torch.equal(to, from_[::4])
    with pytest.raises(Fault, match=r"kernel narrow, line \d+, thread .* at byte -\d+ of buffer 0"):
        run_kernel(WIDE_INDEX, "narrow", [from_, to, 4, 2**33], 10)


GROUPS = shader(
    """
    kernel void sums(device const int* x [[buffer(0)]], device int* y [[buffer(1)]],
                     uint id [[thread_position_in_grid]], uint at [[thread_index_in_threadgroup]],
                     uint size [[threads_per_threadgroup]], uint group [[threadgroup_position_in_grid]]) {
      threadgroup int tile[64];
      threadgroup int total;
      tile[at] = x[id];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (at == 0) {
        total = 0;
        for (uint i = 0; i < size; ++i) total += tile[i];
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      y[id] = total - tile[size - 1 - at];
    }
    kernel void simd(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                     uint id [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
                     uint simdgroup [[simdgroup_index_in_threadgroup]]) {
      float sum = simd_sum(x[id]);
      float neighbour = simd_shuffle_xor(x[id], 1);
      y[id] = sum + neighbour + simd_broadcast(x[id], 3) + lane + 100 * simdgroup;
    }
    """
)


@pytest.mark.parametrize("seed", SEEDS)
def test_threadgroup_memory_and_barriers(seed):
    x = torch.randint(-100, 100, (150,), dtype=torch.int32)
    y = torch.empty_like(x)
    run = run_kernel(GROUPS, "sums", [x, y], 150, 64, uninitialised=[y], seed=seed)
    assert torch.equal(y, torch.cat([part.sum() - part.flip(0) for part in x.split(64)]).int())
    assert run.dispatches[0].threadgroup.bytes_stored > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_simdgroups(seed):
    x = torch.randint(-100, 100, (128,)).float()
    y = torch.empty_like(x)
    run_kernel(GROUPS, "simd", [x, y], 128, 64, uninitialised=[y], seed=seed)
    lanes = torch.arange(32)
    for i, part in enumerate(x.split(32)):
        assert torch.equal(
            y[32 * i : 32 * i + 32], part.sum() + part[lanes ^ 1] + part[3] + lanes + 100 * (i % 2)
        )


ATOMICS = shader(
    """
    kernel void histogram(device const uint* x [[buffer(0)]], device atomic_uint* counts [[buffer(1)]],
                          device atomic_int* most [[buffer(2)]], uint id [[thread_position_in_grid]]) {
      atomic_fetch_add_explicit(&counts[x[id]], 1u, memory_order_relaxed);
      atomic_fetch_max_explicit(most, (int)id, memory_order_relaxed);
    }
    """
)


def test_atomics_of_32_bits_are_no_race():
    x = torch.randint(0, 5, (300,), dtype=torch.int32)
    counts, most = torch.zeros(5, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    run_kernel(ATOMICS, "histogram", [x, counts, most], 300, 50)
    assert torch.equal(counts, torch.bincount(x).int())
    assert most.item() == 299


# ---- Floating point: what the shader does not forbid, the emulator does

FUSED = """
    kernel void multiply_add(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                             uint id [[thread_position_in_grid]]) {
      float product = x[3 * id] * x[3 * id + 1];
      y[id] = (product + x[3 * id + 2]) - x[3 * id + 2] / 1.0f;
    }
    """


def multiply_add(header: str, **options: bool) -> torch.Tensor:
    x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    y = torch.empty(500)
    with emulator.compile_options(**options):
        run_kernel(shader(FUSED, header), "multiply_add", [x, y], 500)
    return y


def test_pragmas_turn_contraction_and_fast_math_off():
    x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    want = x[:, 0] * x[:, 1] + x[:, 2] - x[:, 2]
    assert torch.equal(multiply_add(STRICT), want)
    assert torch.equal(multiply_add(STRICT, fast_math=True), want)
    assert not torch.equal(multiply_add(HEADER), want)
    assert not torch.equal(multiply_add(HEADER, fast_math=True), want)


def test_denormals_can_be_flushed():
    text = shader(
        """
        kernel void halve(device float* x [[buffer(0)]], uint id [[thread_position_in_grid]]) { x[id] *= 0.5f; }
        """
    )
    for flush, want in ((False, 2.0**-127), (True, 0)):
        x = torch.tensor([2.0**-126])
        run_kernel(text, "halve", [x], 1, flush_denormals=flush)
        assert x.double().item() == want


# ---- Planted faults: what does not compile. Each beside a twin that does.

PLANTED = """
    struct Pair { float first; float second; };
    DECLARATIONS
    kernel void f(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                  device atomic_uint* counts [[buffer(2)]], uint id [[thread_position_in_grid]]) {
      BODY
    }
    """

# name: (declarations, body), the same with a fault, what is said of it
NOT_METAL = {
    "double": (("", "y[id] = float(x[id]);"), ("", "y[id] = double(x[id]);"), "no double"),
    "double in a template": (
        ("template <class T> T twice(T x) { return x + x; }", "y[id] = twice<float>(x[id]);"),
        ("template <class T> T twice(T x) { return x + x; }", "y[id] = twice<double>(x[id]);"),
        "no double",
    ),
    "double behind a macro": (
        ("#define REAL float", "y[id] = REAL(x[id]);"),
        ("#define REAL double", "y[id] = REAL(x[id]);"),
        "no double",
    ),
    "long double": (("", "long n = 1;"), ("", "long double n = 1;"), "no long double"),
    "long double literal": (("", "y[id] = 1.0f;"), ("", "y[id] = 1.0L;"), "no long double"),
    "long long": (("", "long n = id;"), ("", "long long n = id;"), "no long long"),
    "unsigned long long": (
        ("", "unsigned long n = id;"),
        ("", "long unsigned int long n = id;"),
        "no long long",
    ),
    "ull": (("", "ulong n = 1ul << 40;"), ("", "ulong n = 1ull << 40;"), r"1ull: Metal has no long long"),
    "LL": (("", "long n = 0x10L;"), ("", "long n = 0x10LL;"), r"0x10LL: Metal has no long long"),
    "128-bit integers": (("", "ulong n = id;"), ("", "unsigned __int128 n = id;"), "no 128-bit"),
    "recursion": (
        ("int g(int n) { return n; } int h(int n) { return n < 2 ? n : g(n - 1); }", "y[id] = h(id);"),
        ("int h(int n) { return n < 2 ? n : h(n - 1) + h(n - 2); }", "y[id] = h(id);"),
        "no recursion: h calls itself",
    ),
    "mutual recursion": (
        ("int g(int n); int h(int n) { return g(n); } int g(int n) { return n; }", "y[id] = h(id);"),
        (
            "int g(int n); int h(int n) { return g(n); } int g(int n) { return n ? h(n / 2) : 0; }",
            "y[id] = h(id);",
        ),
        "no recursion",
    ),
    "new": (("", "int n[2]; n[0] = id;"), ("", "thread int* n = new int[2];"), "no new"),
    "delete": (
        ("", "int n = 0; thread int* p = &n; *p = 1;"),
        ("", "int n = 0; thread int* p = &n; delete p;"),
        "no delete",
    ),
    "throw": (("", "if (id > 9) return;"), ("", "if (id > 9) throw 1;"), "no exceptions"),
    "try": (("", "{ y[id] = 1; }"), ("", "try { y[id] = 1; } catch (...) {}"), "no exceptions"),
    "goto": (("", "if (id > 9) return;"), ("", "if (id > 9) goto end; end: y[id] = 1;"), "no goto"),
    "virtual": (
        ("struct S { int f() { return 1; } };", ""),
        ("struct S { virtual int f() { return 1; } };", ""),
        "no virtual functions",
    ),
    "derived class": (
        ("struct A { int n; }; struct B { A a; };", ""),
        ("struct A { int n; }; struct B : A {};", ""),
        "no derived classes",
    ),
    "typeid": (
        ("", "uint n = sizeof(x[0]);"),
        ("", "bool b = typeid(int) == typeid(float);"),
        "run-time type",
    ),
    "function pointer": (
        ("float g(float x) { return x; }", "y[id] = g(x[id]);"),
        ("float g(float x) { return x; }", "float (*h)(float) = g; y[id] = h(x[id]);"),
        "no function pointers",
    ),
    "function pointer in a template": (
        ("template <class T> T call(T f) { return f; }", "y[id] = call(x[id]);"),
        (
            "float g(float x) { return x; } template <class F> float call(F f) { return f(1); }",
            "y[id] = call(g);",
        ),
        "no function pointers",
    ),
    "type of a function pointer": (
        ("typedef float F;", ""),
        ("typedef float (*F)(float);", ""),
        "no function pointers",
    ),
    "lambda": (
        ("struct Twice { float of(float x) { return 2 * x; } };", "y[id] = Twice().of(x[id]);"),
        ("", "auto twice = [](float x) { return 2 * x; }; y[id] = twice(x[id]);"),
        "no lambdas before 3.2",
    ),
    "C++17": (
        ("template <int n> int g() { if (n == 1) return 1; return 2; }", "y[id] = g<1>();"),
        ("template <int n> int g() { if constexpr (n == 1) return 1; else return 2; }", "y[id] = g<1>();"),
        "C\\+\\+17 extension",
    ),
    "standard library": (
        ("", "y[id] = max(x[id], 0.0f);"),
        ("", "y[id] = std::max(x[id], 0.0f);"),
        "standard library",
    ),
    "include of a standard header": (
        ("#include <metal_math>", ""),
        ("#include <cmath>", ""),
        "include <cmath>",
    ),
    "include of an own header": (
        ("#include <metal_atomic>", ""),
        ('#include "rope_math.h"', ""),
        "rope_math.h",
    ),
    "non-ASCII source": (("// 2 pi", ""), ("// 2 \N{GREEK SMALL LETTER PI}", ""), "is not ASCII"),
    "non-ASCII in a string": (('#define A "x"', ""), ('#define A "\xe9"', ""), "is not ASCII"),
    "64-bit atomics": (
        ("", "atomic_fetch_add_explicit(counts, 1u, memory_order_relaxed);"),
        ("", "atomic_fetch_add_explicit((device atomic_ulong*)counts, 1ul, memory_order_relaxed);"),
        "no 64-bit atomics",
    ),
    "unknown pragma": (
        ("#pragma METAL fp contract(off)", ""),
        ("#pragma METAL fp contraction(off)", ""),
        "none of Metal's",
    ),
    "missing address space of an argument": (
        ("float g(device const float* p) { return p[0]; }", "y[id] = g(x);"),
        ("float g(const float* p) { return p[0]; }", "float n = 1; y[id] = g(&n);"),
        "p: a pointer or reference needs an address space",
    ),
    "missing address space of a reference": (
        ("void g(thread float& p) { p = 1; }", "float n; g(n); y[id] = n;"),
        ("void g(float& p) { p = 1; }", "float n; g(n); y[id] = n;"),
        "p: a pointer or reference needs an address space",
    ),
    "missing address space of a local": (
        ("", "float n[2] = {1, 2}; thread const float* p = n + 1; y[id] = *p;"),
        ("", "float n[2] = {1, 2}; const float* p = n + 1; y[id] = *p;"),
        "p: a pointer or reference needs an address space",
    ),
    "missing address space of a field": (
        ("struct S { device float* p; };", "S s; s.p = y;"),
        ("struct S { float* p; };", "S s; s.p = nullptr;"),
        "p: a pointer or reference needs an address space",
    ),
    "missing address space in a template": (
        ("template <class T> T g(device const T* p) { return p[0]; }", "y[id] = g(x);"),
        ("template <class T> T g(const T* p) { return p[0]; }", "float n = 1; y[id] = g(&n);"),
        "p: a pointer or reference needs an address space",
    ),
    "missing address space of a result": (
        ("device float* g(device float* p) { return p; }", "*g(y + id) = 1;"),
        ("float* g(thread float* p) { return p; }", "float n; *g(&n) = 1;"),
        "g: a pointer or reference needs an address space",
    ),
    "missing address space of a cast": (
        ("", "uint4 n = *(device const uint4*)(x + 4 * id);"),
        ("", "float n = 1; uint m = *(uint*)&n;"),
        "a cast: a pointer or reference needs an address space",
    ),
    "wrong address space": (
        ("float g(device const float* p) { return p[0]; }", "y[id] = g(x);"),
        ("float g(constant float* p) { return p[0]; }", "y[id] = g(x);"),
        "no matching function|no known conversion|different address spaces|changes address space",
    ),
    "address space lost by a cast": (
        ("", "device const uint* p = (device const uint*)x; y[id] = p[0];"),
        ("", "thread const uint* p = (thread const uint*)x; y[id] = p[0];"),
        "address space",
    ),
    "global without an address space": (
        ("constant float table[] = {1, 2};", "y[id] = table[1];"),
        ("float table[] = {1, 2};", "y[id] = table[1];"),
        "table: a variable at namespace scope must be constant",
    ),
    "store through const": (("", "y[id] = 1;"), ("", "x[id] = 1;"), "read-only|not assignable"),
    "store to constant memory": (
        ("constant float table[] = {1, 2};", "y[id] = table[1];"),
        ("constant float table[] = {1, 2};", "table[1] = y[id];"),
        "cannot assign",
    ),
    "function pointer without a variable": (
        (
            "float g(float x) { return x; } float h(float x) { return -x; }",
            "y[id] = id ? g(x[id]) : h(x[id]);",
        ),
        ("float g(float x) { return x; } float h(float x) { return -x; }", "y[id] = (id ? g : h)(x[id]);"),
        "no function pointers",
    ),
    "dynamic_cast": (
        ("struct S {};", ""),
        ("struct S {};", "S s; S t = dynamic_cast<S>(s);"),
        "run-time type",
    ),
    "noexcept": (("void g() {}", ""), ("void g() noexcept {}", ""), "no noexcept"),
    "register": (("", "int n = 1;"), ("", "register int n = 1;"), "no register"),
    "thread_local": (("", "int n = 1;"), ("", "thread_local int n = 1;"), "no thread_local"),
    "assembly": (("", "y[id] = 1;"), ("", 'asm("nop");'), "no inline assembly"),
    "clang's own address spaces": (
        ("float g(device float* p) { return *p; }", ""),
        ("float g(__attribute__((address_space(1))) float* p) { return *p; }", ""),
        "attributes are written",
    ),
    "float8": (("", "float4 n = float4(1);"), ("", "float8 n = float8(1);"), "float8"),
}


def planted(declarations: str, body: str) -> str:
    text = textwrap.dedent(PLANTED)
    return HEADER + text.replace("DECLARATIONS", declarations).replace("BODY", body)


def run_planted(declarations: str, body: str) -> None:
    x, y, counts = torch.ones(64), torch.ones(64), torch.zeros(4, dtype=torch.int32)
    run_kernel(planted(declarations, body), "f", [x, y, counts], 4)


@pytest.mark.parametrize("name", NOT_METAL)
def test_not_metal(name):
    good, bad, message = NOT_METAL[name]
    with emulator.compile_options(metal_version=310):
        with pytest.raises(CompileError, match=message):
            run_planted(*bad)
        run_planted(*good)


def test_lambdas_came_with_metal_3_2():
    with emulator.compile_options(metal_version=320):
        run_planted("", "auto twice = [](float x) { return 2 * x; }; y[id] = twice(x[id]);")


def test_what_the_emulator_cannot_do_is_said():
    with pytest.raises(CompileError, match="copies no whole struct"):
        run_planted("", "Pair p = ((device const Pair*)x)[id];")
    with pytest.raises(CompileError, match="no member functions of objects in device"):
        run_planted("struct S { int n; int get() const device { return n; } };", "")


def test_what_the_preprocessor_drops_is_not_looked_at():
    run_planted("#if !defined(__METAL_VERSION__)\n#include <cmath>\ndouble d = 1ull;\n#endif", "y[id] = 1;")
    run_planted("#if __METAL_VERSION__ < 310\n#error too old\n#endif", "y[id] = 1;")


GOOD_HEAD = "kernel void f(device float* x [[buffer(0)]], device float* y [[buffer(1)]], uint id [[thread_position_in_grid]])"
BAD_HEADS = {
    "instance with other attributes": (
        (
            "kernel void f(device float* x [[buffer(0)]], device float* y [[buffer(1)]], uint id "
            "[[thread_position_in_grid]]) { return; }",
            "template <class T> kernel void g(device T* x [[buffer(0)]], uint id [[thread_position_in_grid]]) {}\n"
            'template [[host_name("f")]] kernel void g<int>(device int* x [[buffer(1)]], uint id [[thread_position_in_grid]]);',
        ),
        "g<int>: its template has other attributes",
    ),
    "two arguments at one index": (("buffer(1)", "buffer(0)"), "x and y are both buffer\\(0\\)"),
    "index beyond 30": (("buffer(1)", "buffer(31)"), "buffer\\(31\\), but Metal has 31: 0 to 30"),
    "argument without attribute": ((" [[buffer(1)]]", ""), "argument y has no attribute"),
    "position without attribute": ((" [[thread_position_in_grid]]", ""), "argument id has no attribute"),
    "misspelt attribute": (
        ("thread_position_in_grid", "thread_position"),
        "thread_position.. is not something",
    ),
    "position of a wrong type": (("uint id", "long id"), "a uint or a ushort"),
    "buffer without address space": (
        ("device float* y", "float* y"),
        "its address space is missing or wrong",
    ),
    "buffer of thread memory": (
        ("device float* y", "thread float* y"),
        "must be a pointer or a reference to device",
    ),
    "buffer by value": (("device float* y", "float y"), "must be a pointer or a reference to device"),
    "result": (("kernel void", "kernel int"), "must return void"),
    "named main": (("void f", "void main"), "may not be named main"),
}


@pytest.mark.parametrize("name", BAD_HEADS)
def test_head_of_a_kernel(name):
    (before, after), message = BAD_HEADS[name]
    text = HEADER + GOOD_HEAD + " { return; }\n"
    assert before in text
    x, y = torch.zeros(2, 4)
    run_kernel(text, "f", [x, y], 4)
    with pytest.raises(CompileError, match=message):
        run_kernel(text.replace(before, after), "f", [x, y], 4)


def test_kernels_and_templates_must_be_there():
    x, y = torch.zeros(2, 4)
    with pytest.raises(CompileError, match="no kernel is named axpy"):
        run_kernel(TEMPLATE, "axpy", [x, y, 4], 4)
    with pytest.raises(CompileError, match="two kernels are named f"):
        run_kernel(
            HEADER + GOOD_HEAD + "{}\n" + GOOD_HEAD.replace("device", "device const") + "{}", "f", [x, y], 4
        )
    with pytest.raises(CompileError, match="needs a host_name"):
        run_kernel(TEMPLATE + "template kernel void axpy<int>(device const int* x [[buffer(0)]], device int* y "
                   "[[buffer(1)]], constant long& n [[buffer(2)]], uint id [[thread_position_in_grid]]);",
                   "axpy_float", [x, y, 4], 4)  # fmt: skip
    with pytest.raises(CompileError, match=r"shader:\d+:\d+: error: expected"):
        run_kernel(HEADER + GOOD_HEAD + "{ y[id] = ; }", "f", [x, y], 4)


# ---- Planted faults: what does not run


ROWS = shader(
    """
    struct Shape { long columns; float factor; };
    kernel void scale(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                      constant Shape& shape [[buffer(2)]], constant long& first [[buffer(3)]],
                      uint id [[thread_position_in_grid]]) {
      for (long i = 0; i < shape.columns; ++i) {
        long at = id * shape.columns + i;
        STORE
      }
    }
    """
)
GOOD_STORE = "y[at] = shape.factor * x[at + first];"
SHAPE = np.array((4, 2.0), dtype=np.dtype([("columns", "<i8"), ("factor", "<f4"), ("pad", "<f4")], align=True)[
    ["columns", "factor"]
])  # fmt: skip
BAD_STORES = {
    "store past the end": (
        "y[at + 1] = x[at];",
        r"stores 4 bytes at byte 80 of buffer 1 \(y\), out of bounds: it has 80",
    ),
    "store before the beginning": (
        "y[at - 1] = x[at];",
        r"stores 4 bytes at byte -4 of buffer 1 \(y\), out of",
    ),
    "load past the end": ("y[at] = x[at + 1];", r"loads 4 bytes at byte 80 of buffer 0 \(x\), out of bounds"),
    "load of an unwritten output": ("y[at] = y[at] + x[at];", r"loads byte \d+ of buffer 1 \(y\), unwritten"),
    "load of half an unwritten output": (
        "if (i) y[at] = 1; y[at] += x[at];",
        r"loads byte \d+ of buffer 1 \(y\), unw",
    ),
    "two threads store one element": (
        "y[i] = x[at];",
        r"race: stores byte \d+ of buffer 1 \(y\), which thread \(\d, 0, 0\) s",
    ),
    "a thread loads what another stored": (
        "y[at] = x[at]; y[at] += y[i + 4 * (id == 0)];",
        r"race: (?:loads|stores) byte \d+ of buffer 1 \(y\)",
    ),
    "store to a const buffer": (
        "y[at] = 1; ((device float*)x)[at] = 1;",
        r"stores 4 bytes into buffer 0 \(x\), which is const",
    ),
    "misaligned vector load": (
        "y[at] = ((device const packed_or_not*)(x + 1))[id].x;",
        r"loads 16 bytes at byte \d+ of buffer 0 \(x\), misaligned: not a multiple of 16",
    ),
    "misaligned scalar load": (
        "y[at] = *(device const float*)((device const uchar*)x + 4 * at + first + 2 * (id == 3 && i == 0));",
        r"loads 4 bytes at byte 50 of buffer 0 \(x\), misaligned: not a multiple of 4",
    ),
    "a pointer into nothing": (
        "y[at] = *(device const float*)(at + 16);",
        "through a pointer into no buffer",
    ),
    "array index": ("float n[3] = {1, 2, 3}; y[at] = n[i];", "an index outside its array"),
    "shift by too much": ("y[at] = (float)(1 << (30 + i));", "a shift by more than the width"),
    "signed overflow": ("y[at] = (float)((int)i + 2147483646);", "a signed sum that overflows"),
    "division by zero": ("y[at] = (float)(id / (uint)i);", "a division by zero"),
}


def rows_shader(store: str) -> str:
    return ROWS.replace("STORE", store).replace("packed_or_not", "float4")


def run_rows(store: str, seed: int = 0, **changes: object) -> torch.Tensor:
    x, y = torch.arange(20.0), torch.empty(20)
    args = {"x": x, "y": y, "shape": SHAPE.tobytes(), "first": 0, **changes}
    run_kernel(rows_shader(store), "scale", list(args.values()), 5, 2, seed=seed, uninitialised=[y])
    return y


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_without_a_fault(seed):
    assert torch.equal(run_rows(GOOD_STORE, seed), 2 * torch.arange(20.0))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", BAD_STORES)
def test_fault_of_a_kernel(name, seed):
    store, message = BAD_STORES[name]
    with pytest.raises(Fault, match=message):
        run_rows(store, seed)


GROUP_FAULTS = {
    "no barrier": ("threadgroup_barrier(mem_flags::mem_threadgroup);", "", "race: "),
    "barrier for other memory": ("mem_flags::mem_threadgroup", "mem_flags::mem_device", "race: "),
    "barrier that some threads miss": (
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
        "if (at > 0) threadgroup_barrier(mem_flags::mem_threadgroup);",
        "waits at a barrier that not all threads reach",
    ),
    "different barriers": (
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
        "if (at)\nthreadgroup_barrier(mem_flags::mem_threadgroup);\nelse\nthreadgroup_barrier(mem_flags::mem_threadgroup);",
        "wait at different barriers",
    ),
    "memory that nothing was stored to": (
        "tile[at] = x[id];",
        "if (at) tile[at] = x[id];",
        r"threadgroup .*unwritten",
    ),
    "beyond the memory": (
        "tile[size - 1 - at]",
        "*(&tile[0] + 64 + at)",
        r"of threadgroup sums::tile, out of bounds: it has 256",
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", GROUP_FAULTS)
def test_fault_of_a_threadgroup(name, seed):
    before, after, message = GROUP_FAULTS[name]
    assert before in GROUPS
    x, y = torch.ones(2, 64, dtype=torch.int32)
    run_kernel(GROUPS, "sums", [x, y], 64, 64, seed=seed)
    with pytest.raises(Fault, match=message):
        run_kernel(GROUPS.replace(before, after, 1), "sums", [x, y], 64, 64, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_thread_may_not_store_what_another_loads(seed):
    text = shader(
        """
        kernel void shift(device const int* from [[buffer(0)]], device int* to [[buffer(1)]],
                          uint id [[thread_position_in_grid]], uint size [[threads_per_grid]]) {
          to[id] = from[(id + 1) % size];
        }
        """
    )
    x, y = torch.arange(8, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
    run_kernel(text, "shift", [x, y], 8, 4, seed=seed)
    assert torch.equal(y, x.roll(-1))
    with pytest.raises(
        Fault, match=r"race: (loads|stores) byte \d+ of buffer \d \(\w+\), .* in the same dispatch"
    ):
        run_kernel(text, "shift", [x, x], 8, 4, seed=seed)
    reads_first = text.replace("to[id] =", "int n =").replace("size];", "size]; if (id == 5) to[0] = n;")
    with pytest.raises(
        Fault, match=r"race: "
    ):  # thread 7 alone loads byte 0, in some orders before the store
        run_kernel(reads_first, "shift", [x, x], 8, 4, seed=seed)


def test_device_memory_is_ordered_by_a_barrier_within_a_threadgroup_only():
    text = shader(
        """
        kernel void pass_on(device int* x [[buffer(0)]], device int* y [[buffer(1)]],
                            uint id [[thread_position_in_grid]], uint size [[threads_per_grid]]) {
          x[id] = id;
          threadgroup_barrier(mem_flags::mem_device);
          y[id] = x[(id + 1) % size] + 0 * x[0];
          threadgroup_barrier(mem_flags::mem_device);
          x[id] = -1;
        }
        """
    )
    x, y = torch.empty(2, 8, dtype=torch.int32)
    run_kernel(text, "pass_on", [x, y], 8, 8)
    assert y.tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    with pytest.raises(Fault, match="race: "):
        run_kernel(text, "pass_on", [x, y], 8, 4)


def test_buffers_of_one_storage():
    # x and y are views of one storage: no race where the threads keep apart, one where they do not.
    base = torch.arange(40.0)
    args = [base[:20], base[20:], SHAPE.tobytes(), 0]
    run = run_kernel(rows_shader("y[at] = x[at];"), "scale", args, 5)
    assert torch.equal(base[20:], torch.arange(20.0))
    assert run.dispatches[0].buffer("y").bytes_loaded == 0
    with pytest.raises(Fault, match=r"race: .*buffer \d \([xy]\)"):
        run_kernel(rows_shader("y[at] = x[at];"), "scale", [base[:20], base[4:24], *args[2:]], 5)


# ---- Planted faults of the host code

NUMBERS = torch.arange(20.0)


def bind_and_run(
    bindings: dict[int, object], threads=(5,), group=(2,), before=None, **options
) -> emulator.Run:
    """The rows shader as host code would call it: `before` runs where arguments are set."""
    with emulator.recording(**options) as run:
        function = shim.function(shim.create_library(rows_shader(GOOD_STORE)), "scale")

        def encode() -> None:
            shim.start_encoding(function)
            for index, value in bindings.items():
                shim.set_arg(function, index, value)
            if before:
                before(function)
            shim.dispatch(function, threads, group)

        shim.command_block(function, encode)
    return run


def good_bindings() -> dict[int, object]:
    return {0: NUMBERS, 1: torch.empty(20), 2: SHAPE.tobytes(), 3: 0}


BAD_BINDINGS = {
    "buffer not bound": ({1: None}, r"kernel scale: buffer 1 \(y\) is not bound"),
    "buffer at a wrong index": ({1: None, 4: torch.empty(20)}, "buffer 4 is bound, but the kernel declares none"),
    "index beyond 30": ({31: 1}, "buffer 31 is set, but Metal has 31"),
    "wrong size of bytes": ({2: SHAPE.tobytes()[:12]}, r"buffer 2 \(shape\) has the wrong size: 12 bytes are set, the kernel declares 16"),
    "int where the kernel has a struct": ({2: 4}, r"wrong size: 8 bytes are set, the kernel declares 16"),
    "int where the kernel has 4 bytes": ({3: b"1234"}, r"buffer 3 \(first\) has the wrong size: 4 bytes"),
    "tensor smaller than the struct": ({2: torch.zeros(3)}, r"wrong size: the tensor has 12 bytes"),
    "tensor that ends within the struct": ({2: torch.zeros(6)[4:]}, r"wrong size: the tensor has 8 bytes"),
    "bytes where the kernel stores": ({1: b"1234"}, r"buffer 1 \(y\) is set as bytes, but the kernel may store"),
    "misaligned tensor": ({0: torch.zeros(99, dtype=torch.uint8)[2:]}, r"buffer 0 \(x\) begins at byte 2 of its storage, misaligned"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_BINDINGS)
def test_fault_of_bindings(name):
    changes, message = BAD_BINDINGS[name]
    bindings = good_bindings() | changes
    with pytest.raises(Fault, match=message):
        bind_and_run({index: value for index, value in bindings.items() if value is not None})


def test_bindings_without_a_fault():
    bindings = good_bindings()
    run = bind_and_run(bindings, uninitialised=[bindings[1]])
    assert torch.equal(bindings[1], 2 * NUMBERS)
    assert (len(run.dispatches), run.command_blocks, run.libraries, run.pipelines) == (1, 1, 1, 1)


BAD_THREADS = {
    "threadgroup too large": ((4096,), (1025,), "a threadgroup of 1025 threads exceeds the limit of 1024"),
    "threadgroup too large in all": ((64, 64), (64, 32), "a threadgroup of 2048 threads exceeds"),
    "empty grid": ((0,), (1,), "the grid has no threads"),
    "empty threadgroup": ((5,), (0,), "the threadgroup has no threads"),
    "too many threadgroups": ((2**30,), (1,), "more threadgroups than the emulator counts"),
    "grid too large": ((2**32,), (1,), "the grid has 2\\^32 threads or more"),
}


@pytest.mark.parametrize("name", BAD_THREADS)
def test_fault_of_the_grid(name):
    threads, group, message = BAD_THREADS[name]
    with pytest.raises(Fault, match=message):
        bind_and_run(good_bindings(), threads, group)


def test_threadgroups_of_a_lesser_gpu():
    bind_and_run(good_bindings(), (5,), (64,))
    with pytest.raises(Fault, match="a threadgroup of 64 threads exceeds the limit of 32"):
        bind_and_run(good_bindings(), (5,), (64,), max_threads=32)


def test_threadgroups_of_a_kernel_with_a_limit():
    text = shader(
        """
        template <class T>
        [[kernel, max_total_threads_per_threadgroup(32)]] void f(device T* x [[buffer(0)]],
                                                                 uint id [[thread_position_in_grid]]) {
          x[id] = 1;
        }
        template [[host_name("f")]] [[kernel]] decltype(f<float>) f<float>;
        """
    )
    run_kernel(text, "f", [torch.zeros(64)], 64, 32)
    with pytest.raises(Fault, match="a threadgroup of 64 threads exceeds the limit of 32"):
        run_kernel(text, "f", [torch.zeros(64)], 64, 64)


def test_torch_refuses_odd_grids():
    with pytest.raises(RuntimeError, match="1 to 3 dimensions"):
        bind_and_run(good_bindings(), (5, 1, 1, 1), None)
    with pytest.raises(RuntimeError, match="different numbers of dimensions"):
        bind_and_run(good_bindings(), (5, 1), (1,))


def in_block(function, *calls) -> None:
    shim.command_block(function, lambda: [call() for call in calls])


WRONG_ORDER = {
    "dispatch without encoding": (lambda f, g: in_block(f, lambda: shim.dispatch(f, (5,), (5,))), "dispatch without start_enc"),
    "argument without encoding": (lambda f, g: in_block(f, lambda: shim.set_arg(f, 3, 1)), "set_arg_int without start_encoding"),
    "encoding outside a block": (lambda f, g: shim.start_encoding(f), "start_encoding outside a command block"),
    "argument outside a block": (lambda f, g: shim.set_arg(f, 0, NUMBERS), "set_arg_tensor outside a command block"),
    "dispatch outside a block": (lambda f, g: shim.dispatch(f, (5,), (5,)), "dispatch outside a command block"),
    "encoding of another block": (
        lambda f, g: (in_block(f, lambda: shim.start_encoding(f)), in_block(f, lambda: shim.set_arg(f, 3, 1))),
        "set_arg_int without start_encoding in this command block",
    ),
    "the encoder at another kernel": (
        lambda f, g: in_block(f, lambda: shim.start_encoding(f), lambda: shim.start_encoding(g), lambda: shim.set_arg(f, 3, 1)),
        "kernel scale: set_arg_int while the encoder is at kernel sums",
    ),
    "bindings of an earlier kernel": (
        lambda f, g: in_block(
            f,
            lambda: shim.start_encoding(f),
            *(lambda i=i, v=v: shim.set_arg(f, i, v) for i, v in good_bindings().items()),
            lambda: shim.dispatch(f, (5,), (5,)),
            lambda: shim.start_encoding(f),
            lambda: shim.dispatch(f, (5,), (5,)),
        ),
        r"buffer 0 \(x\) is not bound",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_ORDER)
def test_fault_of_the_order_of_calls(name):
    calls, message = WRONG_ORDER[name]
    with pytest.raises(Fault, match=message), emulator.recording():
        f = shim.function(shim.create_library(rows_shader(GOOD_STORE)), "scale")
        g = shim.function(shim.create_library(GROUPS), "sums")
        calls(f, g)


def test_a_deleted_library():
    for use in (
        lambda library, f: in_block(f, lambda: shim.start_encoding(f)),
        lambda library, f: shim.function(library, "scale"),
        lambda library, f: shim.delete_shader_library(library),
    ):
        with pytest.raises(Fault, match="deleted"), emulator.recording():
            library = shim.create_library(rows_shader(GOOD_STORE))
            f = shim.function(library, "scale")
            shim.delete_shader_library(library)
            use(library, f)


def test_functions_are_made_once():
    with emulator.recording() as run:
        library = shim.create_library(rows_shader(GOOD_STORE))
        assert shim.function(library, "scale").value == shim.function(library, "scale").value
    assert (run.libraries, run.pipelines) == (1, 1)


def test_compile_errors_are_the_shims():
    bad = rows_shader("y[at] = nothing;")
    with pytest.raises(RuntimeError, match=r"create_shader_library: shader:\d+:\d+: error: .*nothing"):
        shim.create_library(bad)
    with emulator.compile_options(lazy=True):
        library = shim.create_library(bad)
        with pytest.raises(RuntimeError, match=r"get_kernel_function: shader:\d+:\d+: error: .*nothing"):
            shim.function(library, "scale")


def test_outside_a_recording_a_fault_is_an_error():
    f = shim.function(shim.create_library(rows_shader(GOOD_STORE)), "scale")
    with pytest.raises(RuntimeError, match="dispatch outside a command block"):
        shim.dispatch(f, (5,), (5,))


def test_bytes_have_a_limit():
    for data, message in ((b"", "1 to 4096 bytes"), (bytes(4097), "1 to 4096 bytes")):
        with pytest.raises(RuntimeError, match=message):
            bind_and_run(good_bindings() | {2: data})


def test_faults_can_be_looked_at():
    with emulator.recording(raises=False) as run:
        f = shim.function(shim.create_library(rows_shader(GOOD_STORE)), "scale")
        in_block(f, lambda: shim.start_encoding(f), lambda: shim.dispatch(f, (5,), (5,)))
    assert [fault.split(": ")[1] for fault in run.faults] == [
        f"buffer {i} ({name}) is not bound" for i, name in enumerate(["x", "y", "shape", "first"])
    ]


# ---- Host code in C++, unchanged

HOST_TEST = """
import sys, threading
import torch, metal_emulator as emulator
emulator.load(sys.argv[1])
op = torch.ops.metal_emulator_test.scale.default
kernel = torch.library.get_kernel(op, "MPS")
ways = [
    lambda *args: op._op_dk(torch._C.DispatchKey.MPS, *args),
    lambda *args: kernel.call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.MPS), *args),
]
x = torch.arange(40.0)[10:]
results = []
def first_use():
    with torch.no_grad():
        results.append(ways[0](x, 3, True))
threads = [threading.Thread(target=first_use) for _ in range(4)]
[t.start() for t in threads]
[t.join(60) for t in threads]
assert len(results) == 4 and all(torch.equal(y, 3 * x) for y in results)
for way in ways:
    with emulator.recording(seed=1) as run:
        y = way(x, 3, True)
        assert run.unwritten(y) == 0
    assert torch.equal(y, 3 * x)
    (dispatch,) = run.dispatches
    assert dispatch.buffer("x").bytes_loaded == dispatch.buffer("y").bytes_stored == x.nbytes
    assert (run.command_blocks, run.libraries, run.pipelines) == (1, 0, 0)
    assert run.allocations == [y.nbytes] and run.torch_calls == {"aten::empty_like": 1}
    with emulator.recording() as run:
        assert run.unwritten(way(x, 3, False)) == 4 * (len(x) // 4)
try:
    with emulator.recording():
        ways[0](ways[0](x, 3, False), 3, True)
except emulator.Fault as e:
    assert "kernel scale, line 6" in str(e) and "of buffer 0 (x), unwritten" in str(e), e
else:
    raise AssertionError("no fault")
print(dispatch.buffer("factor").bytes_loaded // dispatch.threads)
"""


@pytest.mark.parametrize(("set_arg_bytes", "factor_bytes"), [(False, 8), (True, 4)])
def test_host_code(set_arg_bytes, factor_bytes):
    # A process of its own: host code looks for torch 2.14's function once.
    tests = Path(__file__).parent
    path = emulator.build_host_library([tests / "metal_emulator/test_host.cpp"], set_arg_bytes=set_arg_bytes)
    command = [sys.executable, "-c", HOST_TEST, str(path)]
    done = subprocess.run(command, cwd=tests, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == factor_bytes
