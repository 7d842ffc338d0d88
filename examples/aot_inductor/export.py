"""Two layers of attention over KV pools, packaged by AOTInductor to run from C++ without Python.

Run it, then build and run main.cpp on what it writes; from this folder:

    python export.py attention.pt2 steps.pt
    cmake -B build -DCMAKE_PREFIX_PATH=$(python -c 'import torch; print(torch.utils.cmake_prefix_path)') \
        -DROPEPOOL_LIBRARY=$(python -c 'import torch_ropepool; print(torch_ropepool.library_path())')
    cmake --build build
    build/attention attention.pt2 steps.pt

The token count and the context length are dynamic: one package runs prompts and single tokens. The pools
are buffers of the module, written in place. The package holds their initial zeros, so that it grows with
them; main.cpp shows how a program puts pools of its own in their place.

steps.pt holds the inputs of several steps, and the output and the pools that eager torch makes of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_ropepool

HIDDEN_SIZE, NUM_LAYERS = 64, 2
NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
POOL_SIZE = 4096
TOKEN_COUNTS = (5, 1, 2, 1, 40)  # of the steps: a prompt, then more of the same sequence


class Layer(torch.nn.Module):
    k_pool: Tensor  # [POOL_SIZE, NUM_KV_HEADS, HEAD_DIM]
    v_pool: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(HIDDEN_SIZE, (NUM_QO_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, bias=False)
        self.out = torch.nn.Linear(NUM_QO_HEADS * HEAD_DIM, HIDDEN_SIZE, bias=False)
        self.register_buffer("k_pool", torch.zeros(POOL_SIZE, NUM_KV_HEADS, HEAD_DIM))
        self.register_buffer("v_pool", torch.zeros(POOL_SIZE, NUM_KV_HEADS, HEAD_DIM))

    def forward(self, x: Tensor, positions: Tensor, slots: Tensor, context: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(1, (-1, HEAD_DIM))
        q, k, v = qkv.split([NUM_QO_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        q, _, k_pool, v_pool = torch_ropepool.rope_pool_fused(
            q,
            k,
            v,
            positions,
            slots,
            self.k_pool,
            self.v_pool,
            head_dim=HEAD_DIM,
            num_qo_heads=NUM_QO_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            rope_base=10000.0,
        )
        seen = torch.arange(context.shape[0]) <= positions[:, None]
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k_pool[context].transpose(0, 1)[None],
            v_pool[context].transpose(0, 1)[None],
            attn_mask=seen,
            enable_gqa=True,
        )
        return x + self.out(attended[0].transpose(0, 1).flatten(1))


class Attention(torch.nn.Module):
    """One sequence: `context[p]` is the slot of its token at position p, for all tokens up to now."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.requires_grad_(False)

    def forward(self, x: Tensor, positions: Tensor, slots: Tensor, context: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, positions, slots, context)
        return x


def make_model() -> Attention:
    torch.manual_seed(0)
    return Attention()


def make_steps(token_counts: Sequence[int], seed: int = 0) -> list[tuple[Tensor, ...]]:
    """The inputs of each step: x, positions, slots, context."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(POOL_SIZE, generator=generator)  # a sequence's rows may lie anywhere
    steps, done = [], 0
    for num_tokens in token_counts:
        positions = torch.arange(done, done + num_tokens)
        done += num_tokens
        x = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator)
        steps.append((x, positions, slots[positions], slots[:done].clone()))
    return steps


def export(package_path: str) -> None:
    # Not 0 tokens: torch's attention kernel on the CPU would divide by them. The op itself takes 0.
    num_tokens, context_length = torch.export.Dim("num_tokens", min=1), torch.export.Dim("context_length")
    program = torch.export.export(
        make_model(),
        make_steps([3])[0],
        dynamic_shapes=({0: num_tokens}, {0: num_tokens}, {0: num_tokens}, {0: context_length}),
    )
    torch._inductor.aoti_compile_and_package(program, package_path=package_path)


def save_steps(path: str) -> None:
    """[inputs of each step], [output of each step], {name: pool after the last step}: main.cpp reads it."""
    model, steps = make_model(), make_steps(TOKEN_COUNTS)
    outputs = [model(*step) for step in steps]
    torch.save((steps, outputs, dict(model.named_buffers())), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("package", nargs="?", default="attention.pt2", help="written (default: %(default)s)")
    parser.add_argument("steps", nargs="?", default="steps.pt", help="written (default: %(default)s)")
    args = parser.parse_args()
    export(args.package)
    save_steps(args.steps)


if __name__ == "__main__":
    main()
