"""KVPool: the key and value pools of all layers, and the bookkeeping of their slots."""

from __future__ import annotations

import torch
from torch import Tensor


class PoolExhausted(RuntimeError):
    """`KVPool.alloc` asked for more slots than are free. Nothing was allocated."""


class KVPool:
    """Keys and values of all layers, one row ("slot") per cached token.

    Every layer's k and v pool is a tensor of its own, `[pool_size, num_kv_heads, head_dim]`, so that
    `torch.compile` sees base tensors and not views of one buffer. A slot number means the same row in
    every pool. Which slots are in use is kept on the host; no call reads the device, except `free` of
    a tensor that lives there. Not thread-safe: one scheduler owns a pool.

    Args:
        num_layers: number of layers, at least 1.
        pool_size: number of slots, at least 1.
        num_kv_heads, head_dim: shape of a row, as in `rope_pool_fused`.
        dtype: of the pools; as of the model's k and v.
        device: where the pools are, and where `alloc` puts slots. As in `torch.empty`.

    Raises:
        ValueError: a size is below 1, or the dtype is not a floating-point one.
    """

    def __init__(
        self,
        num_layers: int,
        pool_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        sizes = {
            "num_layers": num_layers,
            "pool_size": pool_size,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point dtype, got {dtype}")
        self.num_layers = num_layers
        self.pool_size = pool_size
        # Zeros, not empty: attention may read rows of padding, and NaN there would spread.
        shape = (pool_size, num_kv_heads, head_dim)
        self._k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        # A stack with the lowest slot on top: a fresh pool hands out 0, 1, 2, ...
        self._free = list(range(pool_size - 1, -1, -1))
        self._in_use = bytearray(pool_size)

    def k(self, layer: int) -> Tensor:
        """The layer's keys, `[pool_size, num_kv_heads, head_dim]`: the pool itself, no copy."""
        return self._k[self._checked_layer(layer)]

    def v(self, layer: int) -> Tensor:
        """The layer's values, `[pool_size, num_kv_heads, head_dim]`: the pool itself, no copy."""
        return self._v[self._checked_layer(layer)]

    @property
    def dtype(self) -> torch.dtype:
        return self._k[0].dtype

    @property
    def device(self) -> torch.device:
        return self._k[0].device

    @property
    def num_free(self) -> int:
        """Number of slots that `alloc` can still hand out."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes that the pools of all layers take."""
        return sum(pool.nbytes for pool in self._k + self._v)

    def alloc(self, n: int) -> Tensor:
        """Takes `n` free slots and returns them, int64 `[n]` on the pool's device.

        Raises:
            ValueError: `n` is negative.
            PoolExhausted: fewer than `n` slots are free; nothing is allocated then.
        """
        if n < 0:
            raise ValueError(f"n must not be negative, got {n}")
        if n > self.num_free:
            raise PoolExhausted(
                f"{n} slots asked for, {self.num_free} of {self.pool_size} are free: "
                "free those of a finished sequence, or make the pool larger"
            )
        kept = self.num_free - n
        taken = self._free[kept:][::-1]
        slots = torch.tensor(taken, dtype=torch.int64, device=self.device)  # if this fails, none is lost
        del self._free[kept:]
        for slot in taken:
            self._in_use[slot] = 1
        return slots

    def free(self, slots: Tensor | list[int]) -> None:
        """Gives slots back. The rows keep their contents until a later token is stored there.

        Args:
            slots: integers, any shape, on any device (one there is copied to the host).

        Raises:
            TypeError: slots are not integers.
            IndexError: a slot is not one of this pool's.
            ValueError: a slot is not in use, or is named twice.

        After an error, no slot has been freed.
        """
        if isinstance(slots, Tensor):
            if slots.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"slots must be int32 or int64, got {slots.dtype}")
            slots = slots.flatten().tolist()
        if not isinstance(slots, list) or not all(type(slot) is int for slot in slots):
            raise TypeError(f"slots must be a tensor or a list of ints, got {slots}")
        given: list[int] = slots
        for slot in given:
            if not 0 <= slot < self.pool_size:
                raise IndexError(f"slot {slot} is not in this pool of {self.pool_size} slots")
        seen: set[int] = set()
        for slot in given:
            if not self._in_use[slot]:
                raise ValueError(f"slot {slot} is not in use: it was freed before or never allocated")
            if slot in seen:
                raise ValueError(f"slot {slot} is named twice in one call")
            seen.add(slot)
        for slot in reversed(given):
            self._in_use[slot] = 0
            self._free.append(slot)

    def __repr__(self) -> str:
        _, num_kv_heads, head_dim = self._k[0].shape
        return (
            f"KVPool(num_layers={self.num_layers}, pool_size={self.pool_size}, "
            f"num_kv_heads={num_kv_heads}, head_dim={head_dim}, dtype={self.dtype}, "
            f"device={self.device}): {self.pool_size - self.num_free} slots in use, "
            f"{self.nbytes / 2**20:.1f} MiB"
        )

    def _checked_layer(self, layer: int) -> int:
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer must be in [0, {self.num_layers}), got {layer}")
        return layer
