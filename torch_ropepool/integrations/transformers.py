"""transformers models on the fused op and a KVPool: `enable(model, pool)`.

    pool = pool_for(model, pool_size=4096)
    with enable(model, pool):
        model.generate(**inputs)

In every attention layer of the model one call of `rope_pool_fused` takes the place of the rotation and of
the cache's copies: it rotates q and k and stores k and v in the pool. Projections, norms, masks and the
attention function stay transformers' own, so results differ by rounding only. (transformers forms its
angles in float32, this op exactly: at position p they part by about p * 6e-8 radians.)
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_rope_utils import dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.versions import require_version

from ..ops import rope_pool_fused
from ..pool import KVPool
from ..rope_parameters import rope_parameters

# This replaces methods, so it holds for these versions only: before, the argument `cache` had another name.
require_version("transformers>=5.24,<6")

# Others were not tried: flash and flex attention would need a GPU, paged ones have a cache of their own.
ATTENTION_IMPLEMENTATIONS = ("eager", "sdpa")


# The families: how each projects the hidden states, [batch, tokens, hidden_size], to q, k and v,
# [batch, tokens, heads, head_dim], as they are before the rotation. No copy: slices stay slices.

Projection = Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]]


def _project(attention: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    q, k, v = (p(hidden_states).unflatten(-1, (-1, attention.head_dim)) for p in projections)
    return q, k, v


def _project_and_norm(attention: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _project(attention, hidden_states)
    return attention.q_norm(q), attention.k_norm(k), v


def _project_cohere(attention: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    project = _project_and_norm if attention.use_qk_norm else _project
    return project(attention, hidden_states)


def _project_stablelm(attention: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _project(attention, hidden_states)
    if attention.qk_layernorm:  # one norm per head, which wants the heads before the tokens
        q = attention.q_layernorm(q.transpose(1, 2)).transpose(1, 2)
        k = attention.k_layernorm(k.transpose(1, 2)).transpose(1, 2)
    return q, k, v


def _project_phi3(attention: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_qo_heads, num_kv_heads = attention.config.num_attention_heads, attention.num_key_value_heads
    packed = attention.qkv_proj(hidden_states).unflatten(-1, (-1, attention.head_dim))
    q, k, v = packed.split([num_qo_heads, num_kv_heads, num_kv_heads], dim=2)
    return q, k, v


def _project_gpt_neox(attention: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    packed = attention.query_key_value(hidden_states).unflatten(-1, (-1, 3 * attention.head_size))
    q, k, v = packed.chunk(3, dim=-1)
    return q, k, v


@dataclass(frozen=True)
class Family:
    attention: str  # name of the attention class
    project: Projection
    output: str = "o_proj"  # name of the projection after attention


FAMILIES = {
    "cohere": Family("CohereAttention", _project_cohere),
    "gpt_neox": Family("GPTNeoXAttention", _project_gpt_neox, output="dense"),
    "llama": Family("LlamaAttention", _project),
    "mistral": Family("MistralAttention", _project),
    "phi3": Family("Phi3Attention", _project_phi3),
    "qwen2": Family("Qwen2Attention", _project),
    "qwen3": Family("Qwen3Attention", _project_and_norm),
    "stablelm": Family("StableLmAttention", _project_stablelm),
}


# The cache.


class _SlotTable:
    """Which slot of the pool each token has: `table`, int64 `[batch, length]`, shared by all layers.

    Rows may share slots: beams have their common past only once.
    """

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.table = torch.empty(0, 0, dtype=torch.int64, device=pool.device)

    def grow(self, batch_size: int, length: int) -> None:
        """Allocates slots until there are `length` columns."""
        if self.table.shape[1] == 0:
            self.table = self.table.new_empty(batch_size, 0)
        if batch_size != self.table.shape[0]:
            raise ValueError(f"this cache holds {self.table.shape[0]} sequences, got a batch of {batch_size}")
        missing = length - self.table.shape[1]
        if missing > 0:
            if batch_size * missing > self.pool.num_free:
                gc.collect()  # a cache in a reference cycle, as compiling and errors leave, still has slots
            new = self.pool.alloc(batch_size * missing).view(batch_size, missing)
            self.table = torch.cat([self.table, new], dim=1)

    def replace(self, table: Tensor) -> None:
        """Takes rows or columns of the old table as the new one, and frees the slots that are not in it."""
        unused = set(self.table.flatten().tolist()).difference(table.flatten().tolist())
        self.table = table
        self.pool.free(sorted(unused))

    def release(self) -> None:
        self.replace(self.table[:, :0])


class _PoolLayer(CacheLayerMixin):
    """One layer's keys and values, and how many columns of the table it has stored."""

    is_sliding = False  # all tokens are kept; transformers' mask then hides those out of the window
    supports_early_init = False
    length: Any  # int, or a tensor

    def __init__(self, slots: _SlotTable, k_pool: Tensor, v_pool: Tensor) -> None:
        super().__init__()
        self.is_initialized = True
        self.slots, self.k_pool, self.v_pool = slots, k_pool, v_pool

    def append(self, batch_size: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The slots of `num_tokens` more tokens `[batch, num_tokens]`, and of all `[batch, kv_length]`."""
        raise NotImplementedError

    def set_length(self, length: int) -> None:
        raise NotImplementedError

    def get_seq_length(self) -> int:
        return self.length  # type: ignore[no-any-return]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a PoolCache works only with a model that is enabled: see enable(model, pool)")


class _GrowingLayer(_PoolLayer):
    """Slots are taken as tokens come, by the first layer of a step for all."""

    is_croppable = True

    def __init__(self, slots: _SlotTable, k_pool: Tensor, v_pool: Tensor) -> None:
        super().__init__(slots, k_pool, v_pool)
        self.length = 0

    def append(self, batch_size: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        start, stop = self.length, self.length + num_tokens
        self.slots.grow(batch_size, stop)
        self.length = stop
        rows = self.slots.table[:, :stop]
        return rows[:, start:], rows

    def set_length(self, length: int) -> None:
        self.length = length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1


class _FixedLayer(_PoolLayer):
    """All slots are taken beforehand and the length is a tensor: nothing in a step depends on the host,
    so it compiles to one graph of fixed shapes."""

    is_compileable = True

    def __init__(self, slots: _SlotTable, k_pool: Tensor, v_pool: Tensor) -> None:
        super().__init__(slots, k_pool, v_pool)
        self.batch_size, self.max_length = slots.table.shape
        self.length = torch.zeros((), dtype=torch.int64, device=slots.table.device)

    def append(self, batch_size: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        table = self.slots.table
        if table.shape != (batch_size, self.max_length):
            held = f"{table.shape[0]} sequences of {table.shape[1]} tokens"
            raise ValueError(f"this cache holds {held}, got a batch of {batch_size}")
        columns = torch.arange(num_tokens, device=table.device) + self.length
        self.length.add_(num_tokens)
        return table[:, columns], table

    def set_length(self, length: int) -> None:
        self.length.fill_(length)  # in place: a compiled graph holds this tensor

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_length, 0

    def get_max_length(self) -> int:
        return self.max_length


class PoolCache(Cache):
    """A transformers `Cache` whose keys and values are rows of a KVPool.

    Without sizes it takes slots as its sequences grow. With both it takes `batch_size * max_length` slots at
    once and has fixed shapes, for `torch.compile`: it is to this what `StaticCache` is to `DynamicCache`.

    Padding takes slots too, as in transformers' caches. The slots go back to the pool with `release()`, at
    the end of a `with` block, or when the cache is garbage.

    Raises:
        ValueError: only one of the sizes is given.
        PoolExhausted: the pool has not enough free slots, here or, without sizes, in a forward call. The
            cache is then as it was before that call.
    """

    def __init__(self, pool: KVPool, *, batch_size: int | None = None, max_length: int | None = None) -> None:
        self.pool = pool
        self._slots = _SlotTable(pool)
        layer_class: type[_PoolLayer] = _GrowingLayer
        if batch_size is not None and max_length is not None:
            self._slots.grow(batch_size, max_length)
            layer_class = _FixedLayer
        elif batch_size is not None or max_length is not None:
            raise ValueError("give both batch_size and max_length, or neither")
        self.pool_layers = [layer_class(self._slots, pool.k(i), pool.v(i)) for i in range(pool.num_layers)]
        super().__init__(layers=list(self.pool_layers))
        weakref.finalize(self, self._slots.release).atexit = False

    @property
    def slots(self) -> Tensor:
        """The slot of each token, int64 `[batch, length]`, first tokens (or padding) first."""
        return self._slots.table

    def release(self) -> None:
        """Gives all slots back and forgets all tokens. Only a cache without sizes can be used again."""
        self._slots.release()
        self._set_length(0)

    def reset(self) -> None:
        """Forgets all tokens. A cache with sizes keeps its slots."""
        if self.is_compileable:
            self._set_length(0)
        else:
            self.release()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens and frees their slots."""
        self._require_growing("crop")
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove must be negative, as for transformers' caches, got {tokens_to_remove}"
            )
        length = max(0, self.get_seq_length() + tokens_to_remove)
        self._set_length(length)
        self._slots.replace(self._slots.table[:, :length])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows, in this order. A row that is named twice shares its past."""
        self._require_growing("reordering (beam search)")
        self._slots.replace(self._slots.table[indices.to(self._slots.table.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row; copies share their past."""
        self._require_growing("repeating rows")
        self._slots.replace(self._slots.table.repeat_interleave(repeats, dim=0))

    def __enter__(self) -> PoolCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __deepcopy__(self, memo: object) -> PoolCache:
        raise NotImplementedError("a PoolCache cannot be copied: its slots belong to one cache")

    def _set_length(self, length: int) -> None:
        for layer in self.pool_layers:
            layer.set_length(length)

    def _require_growing(self, what: str) -> None:
        if self.is_compileable:
            raise NotImplementedError(f"{what} needs a PoolCache without batch_size and max_length")


# The patches.


def _rotary_forward(plain: bool) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """A rotary module's new forward: in place of cos and sin it passes on what they are made of."""

    @dynamic_rope_update  # transformers' own: switches inv_freq for dynamic NTK and longrope
    def forward(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Positions `[batch * tokens]`; and the frequencies in use, None where rope_base gives them."""
        positions = position_ids.expand(x.shape[0], -1).reshape(-1)
        # A buffer that `model.half()` has rounded is no longer what rope_base gives, so is used as it is.
        if plain and self.inv_freq.dtype == torch.float32:
            return positions, None
        return positions, self.inv_freq.to(x.device, torch.float32)

    return forward  # type: ignore[no-any-return]


def _attention_forward(
    family: Family, pool: KVPool, eager_attention: Callable[..., Any], rope: dict[str, Any]
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """An attention module's new forward. `rope`: the op's arguments, less sizes and inv_freq."""
    rope_base = rope.pop("rope_base", None)

    def forward(
        self: Any,
        hidden_states: Tensor,  # [batch, tokens, hidden_size]
        position_embeddings: tuple[Tensor, Tensor | None],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        layer_past: Cache | None = None,  # what GPT-NeoX calls its cache
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        implementation = self.config._attn_implementation
        if implementation not in ATTENTION_IMPLEMENTATIONS:
            raise _unsupported(self.config, f"attention implementation '{implementation}' is not tried")
        cache = layer_past if cache is None else cache
        layer = cache.pool_layers[self.layer_idx] if isinstance(cache, PoolCache) else None
        batch_size, num_tokens = hidden_states.shape[:2]
        positions, inv_freq = position_embeddings
        if layer is None:  # no cache, or one of transformers' own: the op rotates and stores nothing
            slots, k_pool, v_pool = (
                torch.full_like(positions, -1),
                pool.k(self.layer_idx),
                pool.v(self.layer_idx),
            )
        else:
            slots, rows = layer.append(batch_size, num_tokens)
            k_pool, v_pool = layer.k_pool, layer.v_pool

        q, k, v = family.project(self, hidden_states)
        q_rot, k_rot, k_pool, v_pool = rope_pool_fused(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            positions,
            slots.flatten(),
            k_pool,
            v_pool,
            head_dim=q.shape[3],
            num_qo_heads=q.shape[2],
            num_kv_heads=k.shape[2],
            rope_base=rope_base if inv_freq is None else None,
            inv_freq=inv_freq,
            **rope,
        )
        q = q_rot.view_as(q).transpose(1, 2)
        if layer is None:
            k, v = k_rot.view_as(k).transpose(1, 2), v.transpose(1, 2)
            if cache is not None:
                k, v = cache.update(k, v, self.layer_idx, kwargs=kwargs)
        else:
            k, v = k_pool[rows].transpose(1, 2), v_pool[rows].transpose(1, 2)

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        attended, weights = attend(
            self,
            q,  # [batch, num_qo_heads, tokens, head_dim]
            k,  # [batch, num_kv_heads, kv_length, head_dim]
            v,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return getattr(self, family.output)(attended.flatten(2)), weights

    return forward


class Enabled:
    """A model that runs on the op and a pool, until `disable()` or the end of a `with` block."""

    def __init__(self, model: PreTrainedModel, pool: KVPool) -> None:
        self.model = model
        self.pool = pool
        self._undo: list[Callable[[], None]] = []

    def disable(self) -> None:
        """Restores the model. Caches that live on keep their slots, but no longer work with it."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()

    def _patch(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Shadows a method of one object."""
        setattr(owner, name, MethodType(function, owner))
        self._undo.append(lambda: delattr(owner, name))


def enable(model: PreTrainedModel, pool: KVPool) -> Enabled:
    """Makes the model use `rope_pool_fused` and the pool in its attention, in place.

    Then `model.generate(...)` and forward calls with `use_cache` put keys and values into the pool,
    wherever they would make a `DynamicCache` (for `cache_implementation="static"`: a `StaticCache`).
    The cache in their output holds the slots until it is released or garbage. `PoolCache(pool)` as
    `cache=` does the same with you as its owner; give it sizes for `torch.compile(model.forward)`. A compiled
    forward call without a cache, a `use_cache=False` one and one with another kind of cache use the op and
    store nothing in the pool.

    Where Phi-3 passes its `original_max_position_embeddings`, transformers computes the cache anew; until
    that step's end both the old and the new one have slots.

    Args:
        model: of the Llama, Mistral, Qwen2, Qwen3, Phi-3, GPT-NeoX, StableLM or Cohere family, with
            'sdpa' or 'eager' attention, on one device.
        pool: as `pool_for(model, ...)` makes it; several models may share it.

    Returns:
        A handle to undo it: `.disable()`, or a `with` block.

    Raises:
        NotImplementedError: the model, its RoPE or its attention implementation is not supported.
        ValueError: the pool does not fit the model, or the model is enabled already.

    There is no backward: call the model under `torch.no_grad()`, or RuntimeError says so.
    """
    family, attentions, rotary = _parts(model)
    rope = _checked_rope(model, pool)
    plain = "rope_base" in rope
    for key in ("head_dim", "num_qo_heads", "num_kv_heads", "inv_freq"):
        rope.pop(key, None)
    eager_attention = sys.modules[type(attentions[0]).__module__].eager_attention_forward
    attention_forward = _attention_forward(family, pool, eager_attention, rope)

    enabled = Enabled(model, pool)
    for attention in attentions:
        enabled._patch(attention, "forward", attention_forward)
    enabled._patch(rotary, "forward", _rotary_forward(plain))
    if hasattr(model, "_prepare_cache_for_generation"):
        enabled._patch(model, "_prepare_cache_for_generation", _prepare_cache(pool))
    hook = model.base_model.register_forward_pre_hook(_supply_cache(pool), with_kwargs=True)
    enabled._undo.append(hook.remove)
    return enabled


def pool_for(model: PreTrainedModel, pool_size: int) -> KVPool:
    """A KVPool of `pool_size` slots whose layers, heads, dtype and device are the model's.

    Raises:
        NotImplementedError: as `rope_parameters`.
    """
    rope = rope_parameters(model.config)
    return KVPool(
        model.config.num_hidden_layers,
        pool_size,
        rope["num_kv_heads"],
        rope["head_dim"],
        dtype=model.dtype,
        device=model.device,
    )


def _unsupported(config: Any, reason: str) -> NotImplementedError:
    return NotImplementedError(f"cannot enable a model of model_type '{config.model_type}': {reason}")


def _parts(model: PreTrainedModel) -> tuple[Family, list[nn.Module], Any]:
    """The model's family, its attention modules and its rotary module."""
    family = FAMILIES.get(model.config.model_type)
    if family is None:
        raise _unsupported(model.config, f"the families are {', '.join(sorted(FAMILIES))}")
    attentions = [m for m in model.modules() if type(m).__name__ == family.attention]
    if len(attentions) != model.config.num_hidden_layers:
        raise _unsupported(model.config, f"{len(attentions)} of its layers have a {family.attention}")
    rotary = model.base_model.rotary_emb
    if any("forward" in vars(module) for module in (*attentions, rotary)):
        raise ValueError("the forward of this model is replaced already: by enable(), or by accelerate")
    implementation = model.config._attn_implementation
    if implementation not in ATTENTION_IMPLEMENTATIONS:
        supported = " or ".join(map(repr, ATTENTION_IMPLEMENTATIONS))
        raise _unsupported(
            model.config,
            f"attention implementation '{implementation}' is not tried; "
            f"call model.set_attn_implementation with {supported}",
        )
    return family, attentions, rotary


def _checked_rope(model: PreTrainedModel, pool: KVPool) -> dict[str, Any]:
    """The model's `rope_parameters`, after a check that the pool fits them."""
    rope = rope_parameters(model.config)
    wanted = {
        "num_layers": (model.config.num_hidden_layers, pool.num_layers),
        "num_kv_heads": (rope["num_kv_heads"], pool.k(0).shape[1]),
        "head_dim": (rope["head_dim"], pool.k(0).shape[2]),
        "dtype": (model.dtype, pool.dtype),
        "device": (model.device, pool.device),
    }
    wrong = [f"{name} {has}, not {needs}" for name, (needs, has) in wanted.items() if needs != has]
    if wrong:
        raise ValueError(f"the pool does not fit the model, it has {'; '.join(wrong)}: see pool_for")
    return rope


def _supply_cache(pool: KVPool) -> Callable[..., Any]:
    """A forward pre-hook of the decoder: where it would make a DynamicCache, it gets a PoolCache."""

    def hook(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        use_cache = kwargs.get("use_cache")
        use_cache = decoder.config.use_cache if use_cache is None else use_cache
        given = len(args) > 3 or any(kwargs.get(name) is not None for name in ("cache", "past_key_values"))
        # Tracing cannot take slots from the host's list, so there transformers' own cache serves.
        if given or not use_cache or torch.compiler.is_compiling():
            return None
        return args, {**kwargs, "cache": PoolCache(pool)}

    return hook


def _prepare_cache(pool: KVPool) -> Callable[..., None]:
    """`generate`'s own step that makes its cache, with a PoolCache for a dynamic or a static one."""

    def prepare(
        self: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        kind = generation_config.cache_implementation
        given = model_kwargs.get("cache") is not None or generation_config.use_cache is False
        if given or kind not in (None, "dynamic", "static"):
            type(self)._prepare_cache_for_generation(
                self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        elif kind == "static":
            copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            length = max(max_cache_length, generation_config.max_cache_len or 0)
            model_kwargs["cache"] = PoolCache(pool, batch_size=batch_size * copies, max_length=length)
        else:
            model_kwargs["cache"] = PoolCache(pool)

    return prepare
