"""Accuracy of frequencies, angles, sine and cosine, and the conversions of half types."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import expecttest
import mpmath
import numpy as np
import pytest
import torch
from sample import bits, make_sample, round_once
from torch import Tensor

import torch_ropepool
from torch_ropepool import reference

CSRC = Path(torch_ropepool.__file__).parent / "csrc"
ANGLES = json.loads((Path(__file__).parent / "data/angles.json").read_text())

BASES = (10000.0, 10000.5, 100000.0, 500000.0, 1e6, 1.5, 1.0, 0.3)
HEAD_DIMS = (2, 64, 72, 80, 96, 128, 256)
EXTREME_BASES = (5e-324, 1e-300, 1e-3, math.nextafter(1, 0), math.nextafter(1, 2), math.pi, 1e30, 1.7e308)
# One factor at a time from base 10000 and head_dim 128.
TABLES = [(base, 128) for base in BASES] + [(10000.0, head_dim) for head_dim in HEAD_DIMS if head_dim != 128]

_random = random.Random(1)
INT32_POSITIONS = (
    *(0, 1, -1, 131071, 2**31 - 1, -(2**31 - 1), -(2**31)),
    *(_random.randrange(2**24) for _ in range(20)),
    *(-_random.randrange(2**24) for _ in range(5)),
    *(_random.randrange(-(2**31), 2**31) for _ in range(10)),
)
_beyond = (2**31, 2**32 - 1, 2**32, 2**33, 2**40, 2**40 - 1, 2**62, 2**63 - 1)
INT64_POSITIONS = (
    *_beyond,
    *(-position - 1 for position in _beyond),
    *(_random.randrange(-(2**63), 2**63) for _ in range(10)),
)
POSITIONS = INT32_POSITIONS + INT64_POSITIONS

# What the op promises of float32. Made of: polynomials 9e-8, phase 2^-32 turn = 1.5e-9.
FLOAT32_TOLERANCE = 1.5e-7
# Four units in the last place of 1, and the oracle's own rounding. To this comes what a frequency's
# own rounding to 2^-96 turn makes of the position: see float64_tolerance.
FLOAT64_TOLERANCE = 1e-15


def float64_tolerance(position: int) -> float:
    return FLOAT64_TOLERANCE + abs(position) * 2.0**-96 * 2 * math.pi


def op_cos_sin(
    positions: Sequence[int],
    head_dim: int,
    base: float,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]:
    """The op's cos and sin, float64 `[positions, head_dim / 2]`: what a pair (1, 0) is turned to."""
    call = make_sample(len(positions), 1, 1, head_dim, len(positions), dtype=dtype, rope_base=base)
    q = torch.zeros_like(call.q)
    q[..., : head_dim // 2] = 1
    q_rot = call.with_(q=q, positions=torch.tensor(positions, dtype=index_dtype)).run()[0]
    return q_rot[:, 0].double().chunk(2, dim=-1)


@cache
def exact_cos_sin(positions: tuple[int, ...], head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """The same with 320 bits, of which the largest positions and frequencies use up 70."""
    with mpmath.workprec(320):
        frequencies = [mpmath.mpf(base) ** (mpmath.mpf(-2 * i) / head_dim) for i in range(head_dim // 2)]
        pairs = [[mpmath.cos_sin(position * f) for f in frequencies] for position in positions]
        cos = torch.tensor([[float(c) for c, _ in row] for row in pairs], dtype=torch.float64)
        sin = torch.tensor([[float(s) for _, s in row] for row in pairs], dtype=torch.float64)
    return cos, sin


def max_error(got: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> Tensor:
    """Over cos and sin of all pairs, `[positions]`."""
    return torch.stack([(g - e).abs() for g, e in zip(got, exact, strict=True)]).amax(dim=(0, 2))


# ---- Angles, through the op


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_float32_angles_of_the_given_file(index_dtype):
    groups = defaultdict(list)
    for angle in ANGLES:
        groups[angle["rope_base"], angle["head_dim"]].append(angle)
    assert len(ANGLES) == 240
    for (base, head_dim), angles in groups.items():
        cos, sin = op_cos_sin([a["position"] for a in angles], head_dim, base, index_dtype=index_dtype)
        for row, angle in enumerate(angles):
            assert abs(cos[row, angle["pair"]] - float(angle["cos"])) < FLOAT32_TOLERANCE, angle
            assert abs(sin[row, angle["pair"]] - float(angle["sin"])) < FLOAT32_TOLERANCE, angle


@pytest.mark.parametrize(("base", "head_dim"), TABLES)
def test_float32_angles(base, head_dim):
    got = op_cos_sin(POSITIONS, head_dim, base)
    error = max_error(got, exact_cos_sin(POSITIONS, head_dim, base))
    assert error.max() < FLOAT32_TOLERANCE, POSITIONS[error.argmax()]


@pytest.mark.parametrize(("base", "head_dim"), TABLES)
def test_float64_angles(base, head_dim):
    got = op_cos_sin(POSITIONS, head_dim, base, torch.float64)
    error = max_error(got, exact_cos_sin(POSITIONS, head_dim, base))
    for position, e in zip(POSITIONS, error.tolist(), strict=True):
        assert e < float64_tolerance(position), position


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_int32_and_int64_positions_give_the_same_bits(dtype):
    narrow = op_cos_sin(INT32_POSITIONS, 128, 10000.0, dtype, torch.int32)
    wide = op_cos_sin(INT32_POSITIONS, 128, 10000.0, dtype, torch.int64)
    for a, b in zip(narrow, wide, strict=True):
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_position_zero_turns_nothing(dtype):
    cos, sin = op_cos_sin([0], 128, 10000.0, dtype)
    assert torch.equal(cos, torch.ones_like(cos))
    assert torch.equal(sin, torch.zeros_like(sin))


# ---- Frequencies


def exact_frequency(base: float, head_dim: int, pair: int) -> int:
    """Turns per position in units of 2^-96, whole turns dropped. 2000 bits: 5e-324 has turns of 2^1074."""
    with mpmath.workprec(2000):
        inv_freq = mpmath.exp(mpmath.log(base) * (mpmath.mpf(-2 * pair) / head_dim))
        return int(mpmath.floor(inv_freq / (2 * mpmath.pi) * 2**96)) % 2**96


@pytest.mark.parametrize(("base", "head_dim"), [*TABLES, *((base, 64) for base in EXTREME_BASES)])
def test_reference_frequencies_are_correctly_rounded(base, head_dim):
    high, low = reference.turns_of_base(base, head_dim // 2)
    for pair in range(head_dim // 2):
        got = (int(high[pair]) * 2**32 + int(low[pair])) % 2**96
        assert got == exact_frequency(base, head_dim, pair), pair


RANDOM_TABLES = [(10 ** _random.uniform(-2, 8), 2 * _random.randrange(1, 100)) for _ in range(40)]


@pytest.mark.parametrize(
    ("base", "head_dim"), [*TABLES, *((base, 64) for base in EXTREME_BASES), *RANDOM_TABLES, (10000.0, 1000)]
)
def test_kernel_has_the_frequencies_of_the_reference(base, head_dim):
    # One unit (2^-96 turn) of one frequency would show at these positions as 3.7e-10 and more. Kernel and
    # reference compute from the same integers, so they differ by the rounding of each: 1e-15.
    positions = (2**62, -(2**62) - 12345, 2**63 - 1, -(2**63))
    got = op_cos_sin(positions, head_dim, base, torch.float64)
    want = reference.cos_sin(torch.tensor(positions), head_dim, rope_base=base)
    assert max_error(got, want).max() < 2 * FLOAT64_TOLERANCE


def test_more_tables_than_the_cache_holds():
    tables = [(10000.0 + i % 50, 2 + 2 * (i % 7)) for i in range(150)]  # comes back to each after eviction
    for base, head_dim in tables * 2:
        got = op_cos_sin((12345,), head_dim, base, torch.float64)
        want = reference.cos_sin(torch.tensor([12345]), head_dim, rope_base=base)
        assert max_error(got, want).max() < 2 * FLOAT64_TOLERANCE


# ---- rope_math.h itself: filters from stdin to stdout

FILTERS = r"""
#include "rope_math.h"

#include <cstdio>
#include <cstring>
#include <vector>

using namespace rope_pool;

template <class In, class Convert>
int filter(Convert convert) {
  std::vector<In> chunk(1 << 16);
  std::vector<decltype(convert(In{}))> converted;
  for (std::size_t n; (n = std::fread(chunk.data(), sizeof(In), chunk.size(), stdin)) > 0;) {
    converted.clear();
    for (std::size_t i = 0; i < n; ++i) converted.push_back(convert(chunk[i]));
    std::fwrite(converted.data(), sizeof converted[0], n, stdout);
  }
  return 0;
}

int main(int, char** argv) {
  const auto is = [&](const char* name) { return std::strcmp(argv[1], name) == 0; };
  if (is("angle32")) return filter<u32>([](u32 phase) { return angle_of(phase); });
  if (is("angle64")) return filter<u64>([](u64 phase) { return angle_of(phase); });
  if (is("load_float16")) return filter<u16>([](u16 x) { return bits_of(Float16::load(x)); });
  if (is("load_bfloat16")) return filter<u16>([](u16 x) { return bits_of(BFloat16::load(x)); });
  if (is("store_float16")) return filter<u32>([](u32 x) { return Float16::store(float_of(x)); });
  if (is("store_bfloat16")) return filter<u32>([](u32 x) { return BFloat16::store(float_of(x)); });
  return 1;
}
"""


@pytest.fixture(scope="module")
def rope_math(tmp_path_factory) -> Callable[[str, np.ndarray], np.ndarray]:
    """Runs one of the filters on an array."""
    folder = tmp_path_factory.mktemp("rope_math")
    (folder / "filters.cpp").write_text(FILTERS)
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-ffp-contract=off", f"-I{CSRC}"]
    subprocess.run([*command, "filters.cpp", "-o", "filters"], cwd=folder, check=True)
    result_dtype = {
        "angle32": np.float32,
        "angle64": np.float64,
        "load_float16": np.uint32,
        "load_bfloat16": np.uint32,
        "store_float16": np.uint16,
        "store_bfloat16": np.uint16,
    }

    def run(name: str, values: np.ndarray) -> np.ndarray:
        done = subprocess.run(
            [folder / "filters", name], input=values.tobytes(), capture_output=True, check=True
        )
        return np.frombuffer(bytearray(done.stdout), dtype=result_dtype[name])  # writable, as torch wants it

    return run


def near_octants(bit: int, reach: int) -> np.ndarray:
    """Phases within `reach` of each multiple of 2^bit."""
    return (np.arange(8, dtype=np.int64)[:, None] * 2**bit + np.arange(-reach, reach)).ravel()


def test_float32_sine_and_cosine_all_around(rope_math):
    # Tried once on each of the 2^30 phases of a quarter: max error 7.7e-8.
    phases = np.concatenate([np.arange(0, 2**32, 1009), near_octants(29, 4096) % 2**32]).astype(np.uint32)
    got = rope_math("angle32", phases).reshape(-1, 2).astype(np.float64)
    angle = phases * (2 * math.pi / 2**32)  # off by 1e-15 at most: does not matter here
    error = np.abs(got - np.stack([np.cos(angle), np.sin(angle)], axis=1))
    assert error.max() < 9e-8  # as rope_math.h says
    # The quarters are exact: no heading is off by a hair.
    quarters = rope_math("angle32", np.arange(4, dtype=np.uint32) << np.uint32(30)).reshape(-1, 2)
    assert quarters.tolist() == [[1, 0], [0, 1], [-1, 0], [0, -1]]


def test_float64_sine_and_cosine_all_around(rope_math):
    octants = np.arange(8, dtype=np.uint64) << np.uint64(61)
    near = near_octants(61, 256).view(np.uint64)
    dense = np.random.default_rng(0).integers(0, 2**64, 200_000, dtype=np.uint64)
    phases = np.concatenate([octants, near, dense])
    got = rope_math("angle64", phases).reshape(-1, 2)
    # The remainder to the nearest quarter turn, by integers: float64 then has it to 2^-53 of itself.
    quarters = (phases + np.uint64(2**61)) >> np.uint64(62)
    rest = (phases - (quarters << np.uint64(62))).view(np.int64) * (2 * math.pi / 2**64)
    cos, sin = np.cos(rest), np.sin(rest)
    turned = np.choose(
        quarters.astype(np.int64) % 4, [cos + 1j * sin, -sin + 1j * cos, -cos - 1j * sin, sin - 1j * cos]
    )
    error = np.abs(got - np.stack([turned.real, turned.imag], axis=1))
    assert error.max() < 4 * 2**-53 + 2**-52  # 4 units in the last place below 1, 2 of the oracle


# ---- Conversions of half types, on every value


ALL_HALVES = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
HALF_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def halves_as_float32(dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(ALL_HALVES.view(np.int16)).view(dtype).float()


@pytest.mark.parametrize("name", HALF_TYPES)
def test_half_types_load_exactly(rope_math, name):
    got = torch.from_numpy(rope_math(f"load_{name}", ALL_HALVES).view(np.int32))
    want = halves_as_float32(HALF_TYPES[name])
    number = ~want.isnan()
    assert torch.equal(got[number], bits(want)[number])
    assert got[~number].view(torch.float32).isnan().all()


@pytest.mark.parametrize("name", HALF_TYPES)
def test_half_types_are_stored_with_one_rounding_to_nearest_even(rope_math, name):
    dtype = HALF_TYPES[name]
    halves = halves_as_float32(dtype)
    halves = halves[halves.isfinite()].sort().values
    # Every number, every midpoint of two neighbours (exact in float32), and one float32 to each side.
    middles = (halves[1:].double() + halves[:-1].double()).div(2).float()
    exact = torch.cat([halves, middles]).view(torch.int32)
    edges = torch.tensor(
        [0x7F7FFFFF, 0x477FEFFF, 0x477FF000, 0x477FF001, 0x7F7F7FFF, 0x7F7F8000, 1, 0x7F800000]
    )
    nans = torch.tensor([0x7F800001, 0x7F80FFFF, 0x7FC00000, 0x7FFFFFFF, -1, 0xFF800001 - 2**32])
    anything = torch.randint(-(2**31), 2**31, (4_000_000,), generator=torch.Generator().manual_seed(0))
    patterns = torch.cat([exact, exact + 1, exact - 1, edges, edges - 2**31, nans, anything]).to(torch.int32)

    got = torch.from_numpy(rope_math(f"store_{name}", patterns.numpy()).view(np.int16))
    x = patterns.view(torch.float32)
    number = ~x.isnan()
    assert torch.equal(got[number], bits(round_once(x[number].double(), dtype)))
    assert got[~number].view(dtype).isnan().all()


@pytest.mark.parametrize("dtype", HALF_TYPES.values())
def test_the_oracle_rounds_as_torch_does(dtype):
    # From float32 torch rounds once too, so here, and only here, it can be asked.
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-45, 38, 100_000)
    assert torch.equal(bits(round_once(x.double(), dtype)), bits(x.to(dtype)))


def test_the_oracle_rounds_once():
    # 1 + 2^-8 + 2^-40 is above the midpoint; float32 drops the last term, and the tie then goes down.
    x = torch.tensor([1 + 2**-8 + 2**-40, 1 + 2**-11 + 2**-40], dtype=torch.float64)
    assert round_once(x, torch.bfloat16)[0] == 1 + 2**-7
    assert round_once(x, torch.float16)[1] == 1 + 2**-10


# ---- What the integer phase is for


def angle_errors() -> str:
    """Max error of cos and sin over 64 pairs and 64 positions: of the op, and of an angle in float32.

    The latter as in transformers' LlamaRotaryEmbedding, but with each inverse frequency correctly
    rounded to float32: no way of computing those makes it better.
    """
    lines = []
    for base in (10000.0, 500000.0):
        exact_inv_freq = [mpmath.mpf(base) ** (mpmath.mpf(-2 * i) / 128) for i in range(64)]
        inv_freq = torch.tensor([float(f) for f in exact_inv_freq], dtype=torch.float64).float()
        for last in (4096, 131071, 10**6, 16 * 10**6, 2**31 - 1):
            positions = torch.arange(last - 63, last + 1)
            exact = reference.cos_sin(positions, 128, rope_base=base)
            ours = max_error(op_cos_sin(positions.tolist(), 128, base), exact).max()
            angle = positions.float()[:, None] * inv_freq
            float32 = max_error((angle.cos().double(), angle.sin().double()), exact).max()
            lines.append(f"base {base:6.0f}  position {last:10}  op {ours:.0e}  float32 {float32:.0e}")
    return "\n".join(lines)


def test_angle_errors():
    # One digit: all that the last bits of another torch's cos can leave alone.
    expecttest.assert_expected_inline(
        angle_errors(),
        """\
base  10000  position       4096  op 6e-08  float32 2e-04
base  10000  position     131071  op 6e-08  float32 8e-03
base  10000  position    1000000  op 7e-08  float32 6e-02
base  10000  position   16000000  op 7e-08  float32 9e-01
base  10000  position 2147483647  op 6e-08  float32 2e+00
base 500000  position       4096  op 5e-08  float32 2e-04
base 500000  position     131071  op 6e-08  float32 6e-03
base 500000  position    1000000  op 6e-08  float32 5e-02
base 500000  position   16000000  op 7e-08  float32 7e-01
base 500000  position 2147483647  op 6e-08  float32 2e+00""",
    )
