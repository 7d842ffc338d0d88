"""From a transformers config to the keyword arguments of `rope_pool_fused`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# A config does not say how features pair up, only the model's code does. tests/test_transformers.py holds
# each entry against that code; a model that is in neither table is refused, because the wrong layout would
# give plausible text and wrong results.
#
# Half-split pairs (x[i], x[i + rotary_dim / 2]): the code has `rotate_half` with a `cat` of two halves.
# fmt: off
HALF_SPLIT = {
    "apertus", "arcee", "bitnet", "exaone4", "gemma", "gemma2", "glm4_moe", "gpt_neox", "gpt_oss", "granite",
    "granitemoe", "hunyuan_v1_dense", "llama", "ministral", "mistral", "mixtral", "nemotron", "olmo", "olmo2",
    "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text",
    "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl_text", "seed_oss", "smollm3", "stablelm", "starcoder2",
}
# fmt: on
# Interleaved pairs (x[2 i], x[2 i + 1]): the code slices `[..., ::2]` and `[..., 1::2]`, as GPT-J did first.
INTERLEAVED = {"codegen", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "gptj", "helium"}
# These two came before `rope_parameters`: the base is a constant in their code.
FIXED_BASE = {"codegen": 10000.0, "gptj": 10000.0}
# Models with three position axes: whether their code deals the pairs out to them in turn, or in runs.
MROPE = {"qwen2_5_vl_text": False, "qwen2_vl_text": False, "qwen3_vl_text": True}


def rope_parameters(
    config: PreTrainedConfig, seq_len: int | None = None, device: torch.device | str | None = None
) -> dict[str, Any]:
    """The arguments with which `rope_pool_fused` turns q and k as the config's model does.

    Plain RoPE gives `rope_base`, whose angles are exact; scaled RoPE gives transformers' `inv_freq` and,
    where it is not 1, `attention_scaling`. What a model does besides (norms before the rotation, layers
    that do not rotate at all) is not the op's and not here.

    Args:
        config: of a model, or of the text part of one (`config.get_text_config()` is applied).
        seq_len: number of tokens of the sequence, for the types that depend on it: dynamic NTK takes its
            base from it (default: `max_position_embeddings`), longrope its long or short factors (default:
            short). Other types ignore it.
        device: of `inv_freq`. Default: the CPU.

    Returns:
        `head_dim`, `num_qo_heads`, `num_kv_heads`, and either `rope_base` or `inv_freq` (float32,
        `[rotary_dim / 2]`); and where they differ from the op's defaults `attention_scaling`,
        `rotary_dim`, `interleaved`, `mrope_section`, `mrope_interleaved`. With `mrope_section` (Qwen2-VL,
        Qwen2.5-VL, Qwen3-VL) the op takes positions of shape `[3, num_tokens]`.

    Raises:
        NotImplementedError: the op cannot serve this model or this type of RoPE, or it is not known here.
        ImportError: transformers is not installed.
    """
    config = config.get_text_config()
    _refuse_unsupported(config)
    num_qo_heads = config.num_attention_heads
    result: dict[str, Any] = {
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // num_qo_heads,
        "num_qo_heads": num_qo_heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or num_qo_heads,
    }
    if config.model_type in FIXED_BASE:
        rotary_dim = config.rotary_dim or result["head_dim"]
        result["rope_base"] = FIXED_BASE[config.model_type]
    else:
        frequencies, rotary_dim = _frequencies(config, seq_len, device)
        result |= frequencies
    if rotary_dim != result["head_dim"]:
        result["rotary_dim"] = rotary_dim
    if config.model_type in INTERLEAVED:
        result["interleaved"] = True
    return result | _mrope(config)


def _refuse_unsupported(config: PreTrainedConfig) -> None:
    """Raises NotImplementedError, with model_type and reason, for what the op cannot serve."""
    parameters = getattr(config, "rope_parameters", None)
    reason = None
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        reason = "its positions are ALiBi biases, not rotations"
    elif getattr(config, "qk_rope_head_dim", None) is not None:
        reason = "its attention is MLA: only a separate part of each head turns, and no k and v are cached"
    elif parameters and config.nested_rope_parameter_keys(parameters):
        types = ", ".join(config.nested_rope_parameter_keys(parameters))
        reason = f"its RoPE differs by layer type ({types})"
    elif not parameters and config.model_type not in FIXED_BASE:
        reason = "its config has no rope_parameters"
    elif config.model_type not in HALF_SPLIT | INTERLEAVED:
        reason = (
            "how its features pair up is not known here; "
            "if you know, add it to a table in torch_ropepool/rope_parameters.py"
        )
    if reason:
        raise NotImplementedError(f"rope_parameters cannot serve model_type '{config.model_type}': {reason}")


def _frequencies(
    config: PreTrainedConfig, seq_len: int | None, device: torch.device | str | None
) -> tuple[dict[str, Any], int]:
    """`rope_base`, or `inv_freq` and `attention_scaling`; and the number of features that turn."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":
        inv_freq, scaling = _rotary_class(config).compute_default_rope_parameters(config)
        base = float(config.rope_parameters["rope_theta"])
        if _follows_base(inv_freq, base):
            return {"rope_base": base}, 2 * len(inv_freq)
    elif rope_type in ROPE_INIT_FUNCTIONS:
        # A tensor, as the models pass it: dynamic NTK then rounds its base as they do.
        length = None if seq_len is None else torch.tensor(seq_len)
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](
            config, torch.device(device or "cpu"), seq_len=length
        )
    else:
        known = ", ".join(sorted(ROPE_INIT_FUNCTIONS))
        raise NotImplementedError(
            f"rope_parameters cannot serve rope_type '{rope_type}' of model_type '{config.model_type}': "
            f"transformers' ROPE_INIT_FUNCTIONS has {known}"
        )
    result: dict[str, Any] = {"inv_freq": inv_freq.to(device or "cpu", torch.float32)}
    if scaling != 1.0:
        result["attention_scaling"] = float(scaling)
    return result, 2 * len(inv_freq)


def _follows_base(inv_freq: Tensor, base: float) -> bool:
    """Whether these are `base ** (-2 i / rotary_dim)`: not where an odd size was rounded up to pairs."""
    exponents = torch.arange(len(inv_freq), dtype=torch.float64) / len(inv_freq)
    return torch.allclose(inv_freq.cpu().double(), base**-exponents, rtol=1e-5, atol=0)


def _rotary_class(config: PreTrainedConfig) -> Any:
    """The class in the model's own module that initialises its frequencies."""
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    for member in vars(importlib.import_module(name)).values():
        if hasattr(member, "compute_default_rope_parameters"):
            return member
    raise NotImplementedError(
        f"rope_parameters cannot serve model_type '{config.model_type}': {name} has no default RoPE"
    )


def _mrope(config: PreTrainedConfig) -> dict[str, Any]:
    if config.model_type not in MROPE:
        return {}
    # From the model's module, because the default for a config without an mrope_section is in its code.
    section = list(_rotary_class(config)(config).mrope_section)
    interleaved = {"mrope_interleaved": True} if MROPE[config.model_type] else {}
    return {"mrope_section": section, **interleaved}
