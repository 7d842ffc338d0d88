"""The overlap decision against brute force, and on layouts that engines use."""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass
from math import prod

import pytest
from sample import contiguous_strides

from torch_ropepool._library import LIBRARY

NO, YES, UNDECIDED = 0, 1, 2
SEED = 20250102
NUM_CASES = 30_000
ITEMSIZES = [2, 4, 8]


@dataclass
class View:
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    itemsize: int = 4
    address: int = 0  # in bytes

    def geometry(self) -> tuple:
        dims = ctypes.c_int64 * len(self.sizes)
        return (
            ctypes.c_int64(self.itemsize),
            ctypes.c_int64(len(self.sizes)),
            dims(*self.sizes),
            dims(*self.strides),
        )

    def elements(self) -> list[int]:
        """The address of each index tuple's element."""
        starts = [self.address]
        for size, stride in zip(self.sizes, self.strides, strict=True):
            starts = [start + n * stride * self.itemsize for start in starts for n in range(size)]
        return starts

    def touched(self) -> set[int]:
        return {start + byte for start in self.elements() for byte in range(self.itemsize)}


def overlap(a: View, b: View) -> int:
    address = ctypes.c_uint64
    return LIBRARY.rope_pool_overlap(address(a.address), *a.geometry(), address(b.address), *b.geometry())


def self_overlap(view: View) -> int:
    return LIBRARY.rope_pool_self_overlap(*view.geometry())


# ---- Against brute force


def random_view(r: random.Random, itemsize: int) -> View:
    """Up to 4 dimensions: dense and permuted, perhaps spread, perhaps with a stride that is just off."""
    sizes = [r.choice([1, 1, 2, 3, 4, 5]) for _ in range(r.randrange(5))]
    if r.random() < 0.03 and sizes:
        sizes[r.randrange(len(sizes))] = 0
    order = r.sample(range(len(sizes)), len(sizes))
    strides = [0] * len(sizes)
    step = r.choice([1, 1, 1, 2, 3])
    for d in order:
        strides[d] = step
        step = max(0, step * max(sizes[d], 1) + r.choice([0, 0, 0, 0, 1, 3, -1]))
    if r.random() < 0.3 and sizes:
        strides[r.randrange(len(sizes))] = r.randrange(0, 20)
    return View(tuple(sizes), tuple(strides), itemsize, r.randrange(0, 160))


def test_overlap_is_what_brute_force_says() -> None:
    r = random.Random(SEED)
    found = {NO: 0, YES: 0, "interleaved": 0}
    for case in range(NUM_CASES):
        a = random_view(r, r.choice(ITEMSIZES))
        b = random_view(r, r.choice([a.itemsize, *ITEMSIZES]))
        of_a, of_b = a.touched(), b.touched()
        expected = NO if of_a.isdisjoint(of_b) else YES
        assert overlap(a, b) == expected, (SEED, case, a, b)
        assert overlap(b, a) == expected, (SEED, case, b, a)
        found[expected] += 1
        if expected == NO and of_a and of_b and min(of_a) < max(of_b) and min(of_b) < max(of_a):
            found["interleaved"] += 1
    assert min(found.values()) > NUM_CASES / 20, found


def test_self_overlap_is_what_brute_force_says() -> None:
    r = random.Random(SEED)
    found = {NO: 0, YES: 0}
    for case in range(NUM_CASES):
        view = random_view(r, r.choice(ITEMSIZES))
        elements = view.elements()
        expected = NO if len(set(elements)) == len(elements) else YES
        assert self_overlap(view) == expected, (SEED, case, view)
        found[expected] += 1
    assert min(found.values()) > NUM_CASES / 20, found


def test_addresses_are_64_bit() -> None:
    """The same views, moved up by where real tensors lie, and beyond 2^63."""
    r = random.Random(SEED + 1)
    for case in range(2000):
        a, b = random_view(r, 4), random_view(r, 8)
        expected = overlap(a, b)
        for base in (0x7F12_3456_7000, 2**63 - 64, 2**64 - 2**20):
            moved = [View(v.sizes, v.strides, v.itemsize, v.address + base) for v in (a, b)]
            assert overlap(*moved) == expected, (case, base, a, b)


def test_sizes_are_64_bit() -> None:
    rows = 3 * 2**30  # float32 elements: 12 GiB a column
    left = View((rows, 2), (4, 1), 4, 0)
    assert overlap(left, View((rows, 2), (4, 1), 4, 8)) == NO
    assert overlap(left, View((rows, 2), (4, 1), 4, 4)) == YES
    last = (rows - 1) * 16
    assert overlap(left, View((1,), (1,), 4, last + 4)) == YES
    assert overlap(left, View((1,), (1,), 4, last + 8)) == NO
    assert self_overlap(View((rows, 4), (4, 1))) == NO
    assert self_overlap(View((rows, 5), (4, 1))) == YES


# ---- Layouts that engines use: always decided

SHAPE = (512, 8, 128)  # pool_size, num_kv_heads, head_dim


def taken(buffer: tuple[int, ...], index: dict[int, int], itemsize: int = 2) -> View:
    """The view of a contiguous buffer with these dimensions fixed."""
    strides = contiguous_strides(buffer)
    kept = [d for d in range(len(buffer)) if d not in index]
    offset = sum(n * strides[d] for d, n in index.items())
    return View(tuple(buffer[d] for d in kept), tuple(strides[d] for d in kept), itemsize, offset * itemsize)


POOL, HEADS, DIM = SHAPE
# The buffer's shape, and which index of which dimension the one and the other pool take.
TWO_POOLS = {
    "[2, pool, heads, dim]": ((2, *SHAPE), {0: 0}, {0: 1}),
    "[pool, 2, heads, dim]": ((POOL, 2, HEADS, DIM), {1: 0}, {1: 1}),
    "[pool, heads, 2, dim]": ((POOL, HEADS, 2, DIM), {2: 0}, {2: 1}),
    "[pool, heads, dim, 2]": ((POOL, HEADS, DIM, 2), {3: 0}, {3: 1}),
    "[layers, 2, pool, heads, dim], one layer": ((4, 2, *SHAPE), {0: 1, 1: 0}, {0: 1, 1: 1}),
    "[layers, 2, pool, heads, dim], two layers": ((4, 2, *SHAPE), {0: 1, 1: 1}, {0: 2, 1: 0}),
    "[pool, layers, 2, heads, dim]": ((POOL, 4, 2, HEADS, DIM), {1: 3, 2: 0}, {1: 3, 2: 1}),
    "[pool, layers, 2, heads, dim], two layers": ((POOL, 4, 2, HEADS, DIM), {1: 0, 2: 1}, {1: 3, 2: 0}),
    "[pool, heads, layers, 2, dim]": ((POOL, HEADS, 4, 2, DIM), {2: 1, 3: 0}, {2: 2, 3: 0}),
}


@pytest.mark.parametrize("name", TWO_POOLS)
@pytest.mark.parametrize("itemsize", ITEMSIZES)
def test_pools_of_one_buffer_do_not_overlap(name: str, itemsize: int) -> None:
    buffer, one, other = TWO_POOLS[name]
    a, b = taken(buffer, one, itemsize), taken(buffer, other, itemsize)
    assert (overlap(a, b), overlap(b, a)) == (NO, NO)
    assert (self_overlap(a), self_overlap(b)) == (NO, NO)
    assert overlap(a, a) == YES
    b.address = a.address + (DIM - 1) * a.strides[2] * itemsize  # one element of each is the same
    assert (overlap(a, b), overlap(b, a)) == (YES, YES)


@pytest.mark.parametrize("order", ["012", "021", "102", "120", "201", "210"])
def test_permuted_pools_do_not_overlap_themselves(order: str) -> None:
    dims = [int(d) for d in order]
    dense = contiguous_strides(tuple(SHAPE[d] for d in dims))
    view = View(SHAPE, tuple(dense[dims.index(d)] for d in range(3)), 2)
    assert self_overlap(view) == NO


@pytest.mark.parametrize("num_tokens", [1, 7, 4096])
def test_column_slices_of_a_packed_projection_do_not_overlap(num_tokens: int) -> None:
    qo_heads, kv_heads = 32, 8
    row = (qo_heads + 2 * kv_heads) * DIM
    q, k, v = (
        View((num_tokens, heads, DIM), (row, DIM, 1), 2, first * DIM * 2)
        for heads, first in ((qo_heads, 0), (kv_heads, qo_heads), (kv_heads, qo_heads + kv_heads))
    )
    for a, b in ((q, k), (q, v), (k, v)):
        assert (overlap(a, b), overlap(b, a)) == (NO, NO)
        moved = View(b.sizes, b.strides, 2, a.address + (DIM - 1) * 2)
        assert (overlap(a, moved), overlap(moved, a)) == (YES, YES)


def test_indices_between_the_rows_of_a_pool_do_not_overlap() -> None:
    """int64 in the last 8 bytes of each row of a half-precision buffer."""
    row = HEADS * DIM + 4
    pool = View(SHAPE, (row, DIM, 1), 2)
    positions = View((POOL,), (row // 4,), 8, HEADS * DIM * 2)
    assert overlap(pool, positions) == NO
    positions.address -= 1
    assert overlap(pool, positions) == YES


# ---- What is too hard says so, and does not take long


def test_hard_strides_are_undecided() -> None:
    pool = View((128, 16, 64), (1271, 5259, 766))
    elements = pool.elements()
    assert len(set(elements)) == len(elements)  # they do not overlap: this is a refusal to search on
    assert self_overlap(pool) == UNDECIDED
    a = View((128, 4, 64), (767, 8219, 594))
    b = View((4, 8, 64), (2672, 3451, 1474), 4, 4 * 4314)
    assert self_overlap(a) == self_overlap(b) == NO
    assert overlap(a, b) == UNDECIDED
    assert overlap(b, a) == UNDECIDED


def test_undecided_views_are_rare() -> None:
    """Even of random strides, most are decided; and a decision is never wrong."""
    r = random.Random(SEED + 2)
    undecided = 0
    for case in range(300):
        sizes = (r.choice([8, 32]), r.choice([2, 8]), r.choice([16, 64]))
        view = View(sizes, tuple(r.randrange(1, 3000) for _ in sizes))
        found = self_overlap(view)
        undecided += found == UNDECIDED
        if found != UNDECIDED:
            distinct = len(set(view.elements())) == prod(sizes)
            assert found == (NO if distinct else YES), (SEED, case, view)
    assert undecided < 100
