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
    all_ = torch.frombuffer(bytearray(b"".join(layout_bytes(0, 0, i, 0) for i in range(5))), dtype=torch.uint8)
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
        assert torch.equal(y[32 * i : 32 * i + 32], part.sum() + part[lanes ^ 1] + part[3] + lanes + 100 * (i % 2))


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
