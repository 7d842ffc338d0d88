"""Fused RoPE and KV-pool write as a torch op. Importing this registers `torch.ops.ropepool`."""

from . import _fake as _fake  # registers the fake kernel and the composites
from . import reference
from ._library import library_path
from ._version import __version__
from .ops import rope_pool_fused, rope_pool_fused_
from .pool import KVPool, PoolExhausted
from .rope_parameters import rope_parameters

__all__ = [
    "KVPool",
    "PoolExhausted",
    "__version__",
    "library_path",
    "reference",
    "rope_parameters",
    "rope_pool_fused",
    "rope_pool_fused_",
]
