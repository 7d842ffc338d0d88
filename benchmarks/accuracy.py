"""How far cos and sin are from the exact ones, by position: this op, and float32 angles as commonly done.

Prints the table of the README. `python benchmarks/accuracy.py [--head-dim 128] [--rope-base 500000]`
"""

from __future__ import annotations

import argparse

import mpmath
import torch

import torch_ropepool

POSITIONS = (4095, 131071, 1_000_000, 16_000_000, 2**31 - 1)
NEAR = 64  # positions tried below each of these


def exact_angles(positions: torch.Tensor, head_dim: int, rope_base: float) -> torch.Tensor:
    """cos and sin in 320-bit arithmetic, rounded to float64: `[2, num_positions, head_dim / 2]`."""
    with mpmath.workprec(320):
        inv_freq = [mpmath.mpf(rope_base) ** (mpmath.mpf(-2 * i) / head_dim) for i in range(head_dim // 2)]
        rows = [[mpmath.cos_sin(position * f) for f in inv_freq] for position in positions.tolist()]
    cos = [[float(c) for c, _ in row] for row in rows]
    sin = [[float(s) for _, s in row] for row in rows]
    return torch.tensor([cos, sin], dtype=torch.float64)


def op_angles(positions: torch.Tensor, head_dim: int, rope_base: float) -> torch.Tensor:
    """The op's own: a head whose first half is ones and second half zeros turns into cos and sin."""
    half = head_dim // 2
    q = torch.zeros(len(positions), 1, head_dim)
    q[..., :half] = 1
    pool = torch.zeros(0, 1, head_dim)
    q_rot, *_ = torch_ropepool.rope_pool_fused(
        q,
        q.clone(),
        q.clone(),
        positions,
        torch.full_like(positions, -1),
        pool,
        pool.clone(),
        head_dim=head_dim,
        num_qo_heads=1,
        num_kv_heads=1,
        rope_base=rope_base,
    )
    return torch.stack([q_rot[:, 0, :half], q_rot[:, 0, half:]])


def float32_angles(positions: torch.Tensor, head_dim: int, rope_base: float) -> torch.Tensor:
    """Angles as a float32 product of position and inv_freq, as transformers and most engines do."""
    inv_freq = 1.0 / (rope_base ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    angle = positions.float()[:, None] * inv_freq
    return torch.stack([angle.cos(), angle.sin()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rope-base", type=float, default=500_000.0)
    args = parser.parse_args()
    print(f"Largest error of cos and sin, head_dim {args.head_dim}, rope_base {args.rope_base:g}")
    print("| positions up to | torch_ropepool | float32 angles |")
    print("|---|---|---|")
    for top in POSITIONS:
        positions = torch.arange(top - NEAR + 1, top + 1)
        exact = exact_angles(positions, args.head_dim, args.rope_base)
        errors = [
            (angles(positions, args.head_dim, args.rope_base).double() - exact).abs().max().item()
            for angles in (op_angles, float32_angles)
        ]
        print(f"| {top} | {errors[0]:.1e} | {errors[1]:.1e} |")


if __name__ == "__main__":
    main()
