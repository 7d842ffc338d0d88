"""KVPool: which slots it hands out, what it refuses, and its pools under the op."""

from __future__ import annotations

import expecttest
import pytest
import torch
from sample import bits, make_sample

from torch_ropepool import KVPool, PoolExhausted, rope_pool_fused


def make_pool(
    num_layers: int = 3, pool_size: int = 8, num_kv_heads: int = 2, head_dim: int = 64, **kwargs
) -> KVPool:
    return KVPool(num_layers, pool_size, num_kv_heads, head_dim, **kwargs)


def text_of(expected: type[Exception], call) -> str:
    with pytest.raises(expected) as error:
        call()
    assert error.type is expected
    return str(error.value)


def all_in_turn(pool: KVPool) -> list[int]:
    """All free slots, in the order in which they are handed out. The pool is as before."""
    slots = pool.alloc(pool.num_free)
    pool.free(slots)
    return slots.tolist()


def test_a_new_pool_is_zero_and_hands_out_slots_in_order():
    pool = make_pool(dtype=torch.float16)
    for layer in range(3):
        for t in (pool.k(layer), pool.v(layer)):
            assert t.shape == (8, 2, 64)
            assert t.dtype == pool.dtype == torch.float16
            assert t.device == pool.device == torch.device("cpu")
            assert t.is_contiguous()
            assert not t.any()
    assert pool.num_free == 8
    slots = pool.alloc(3)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [0, 1, 2]
    assert pool.alloc(5).tolist() == [3, 4, 5, 6, 7]
    assert pool.num_free == 0


def test_every_pool_has_a_storage_of_its_own():
    pool = make_pool()
    pools = [pool.k(layer) for layer in range(3)] + [pool.v(layer) for layer in range(3)]
    assert len({t.untyped_storage().data_ptr() for t in pools}) == 6
    for t in pools:
        assert t._base is None
        assert t.storage_offset() == 0
    assert pool.k(1) is pool.k(1)
    assert pool.v(1) is pool.v(1)


@pytest.mark.parametrize(
    "give", [lambda s: s, lambda s: s.int(), lambda s: s.tolist(), lambda s: s.view(3, 1)]
)
def test_freed_slots_are_handed_out_again(give):
    pool = make_pool()
    pool.alloc(2)
    slots = pool.alloc(3)
    pool.free(give(slots))
    assert pool.num_free == 6
    assert pool.alloc(6).tolist() == [2, 3, 4, 5, 6, 7]
    assert pool.num_free == 0


def test_slots_in_use_are_never_handed_out():
    pool = make_pool(pool_size=40)
    generator = torch.Generator().manual_seed(0)
    in_use: list[int] = []
    for _ in range(200):
        n = int(torch.randint(0, 9, (), generator=generator))
        if n <= pool.num_free:
            in_use += pool.alloc(n).tolist()
        else:
            pool.free(
                [in_use.pop(int(torch.randint(len(in_use), (), generator=generator))) for _ in range(n)]
            )
        assert len(set(in_use)) == len(in_use) == 40 - pool.num_free
        assert all(0 <= slot < 40 for slot in in_use)


def test_nothing_to_alloc_or_free():
    pool = make_pool()
    empty = pool.alloc(0)
    assert empty.shape == (0,)
    assert empty.dtype == torch.int64
    pool.free(empty)
    pool.free([])
    assert pool.num_free == 8


def test_freeing_keeps_the_rows():
    pool = make_pool()
    slots = pool.alloc(2)
    pool.k(0)[slots] = 1
    pool.free(slots)
    assert (pool.k(0)[:2] == 1).all()


def test_refused_sizes():
    texts = [
        text_of(ValueError, lambda: make_pool(num_layers=0)),
        text_of(ValueError, lambda: make_pool(pool_size=0)),
        text_of(ValueError, lambda: make_pool(num_kv_heads=0)),
        text_of(ValueError, lambda: make_pool(head_dim=-64)),
        text_of(ValueError, lambda: make_pool(dtype=torch.int8)),
    ]
    expecttest.assert_expected_inline(
        "\n".join(texts),
        """\
num_layers must be at least 1, got 0
pool_size must be at least 1, got 0
num_kv_heads must be at least 1, got 0
head_dim must be at least 1, got -64
dtype must be a floating-point dtype, got torch.int8""",
    )


def test_refused_layers():
    pool = make_pool()
    texts = [text_of(IndexError, lambda get=get, n=n: get(n)) for get in (pool.k, pool.v) for n in (-1, 3)]
    expecttest.assert_expected_inline(
        "\n".join(texts),
        """\
layer must be in [0, 3), got -1
layer must be in [0, 3), got 3
layer must be in [0, 3), got -1
layer must be in [0, 3), got 3""",
    )


def test_refused_alloc_changes_nothing():
    pool = make_pool()
    pool.alloc(2)
    before = all_in_turn(pool)
    assert issubclass(PoolExhausted, RuntimeError)
    texts = [text_of(PoolExhausted, lambda: pool.alloc(7)), text_of(ValueError, lambda: pool.alloc(-1))]
    assert all_in_turn(pool) == before
    expecttest.assert_expected_inline(
        "\n".join(texts),
        """\
7 slots asked for, 6 of 8 are free: free those of a finished sequence, or make the pool larger
n must not be negative, got -1""",
    )


def test_refused_free_changes_nothing():
    pool = make_pool()
    pool.alloc(6)
    pool.free([4])
    before = all_in_turn(pool)
    texts = [
        # Each names a slot that could be freed first.
        text_of(IndexError, lambda: pool.free([0, 8])),
        text_of(IndexError, lambda: pool.free([0, -1])),
        text_of(ValueError, lambda: pool.free([0, 4])),
        text_of(ValueError, lambda: pool.free([0, 7])),
        text_of(ValueError, lambda: pool.free(torch.tensor([0, 1, 0]))),
        text_of(TypeError, lambda: pool.free(torch.tensor([0.0, 1.0]))),
        text_of(TypeError, lambda: pool.free([0.5])),
        text_of(TypeError, lambda: pool.free([True])),
    ]
    assert all_in_turn(pool) == before
    expecttest.assert_expected_inline(
        "\n".join(texts),
        """\
slot 8 is not in this pool of 8 slots
slot -1 is not in this pool of 8 slots
slot 4 is not in use: it was freed before or never allocated
slot 7 is not in use: it was freed before or never allocated
slot 0 is named twice in one call
slots must be int32 or int64, got torch.float32
slots must be a tensor or a list of ints, got [0.5]
slots must be a tensor or a list of ints, got [True]""",
    )


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_nbytes(dtype, itemsize):
    assert make_pool(dtype=dtype).nbytes == 2 * 3 * 8 * 2 * 64 * itemsize


def test_repr():
    pool = make_pool(num_layers=2, pool_size=1024, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    pool.alloc(3)
    expecttest.assert_expected_inline(
        repr(pool).replace("): ", "):\n"),
        """\
KVPool(num_layers=2, pool_size=1024, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, device=cpu):
3 slots in use, 8.0 MiB""",
    )


def test_the_op_writes_the_pool_of_its_layer():
    pool = make_pool(pool_size=16)
    pool.alloc(4)
    slots = pool.alloc(7)
    call = make_sample(7, pool_size=16)
    for layer in (0, 2):
        args = (call.q, call.k, call.v, call.positions, slots, pool.k(layer), pool.v(layer))
        _, k_rot, k_pool, v_pool = rope_pool_fused(*args, **call.kwargs)
        assert k_pool is pool.k(layer)
        assert v_pool is pool.v(layer)
        assert torch.equal(bits(pool.k(layer)[slots]), bits(k_rot))
        assert torch.equal(bits(pool.v(layer)[slots]), bits(call.v))
        assert not pool.k(layer)[:4].any()
        assert not pool.v(layer)[11:].any()
    assert not pool.k(1).any()
    assert not pool.v(1).any()
