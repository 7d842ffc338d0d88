"""Does a change make a plain call slower? Two checkouts, each with its library built, in one run.

Each checkout has a process of its own; they take turns, so that what else the machine does hits both.
Prints, by number of tokens, the median time of a call and the median of the rounds' ratios, with the
middle half of them. `python benchmarks/compare_builds.py BEFORE AFTER`
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

ROUNDS = 40
SECONDS_PER_TURN = 0.02
NUM_TOKENS = (1, 8, 64, 512)


def worker(root: str) -> None:
    """Answers each number of tokens on standard input with the median seconds of a call, Llama-3-8B shape."""
    sys.path.insert(0, root)
    import torch

    import torch_ropepool

    assert torch_ropepool.__file__.startswith(root), torch_ropepool.__file__
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    op = torch.ops.ropepool.rope_pool_fused_
    pools = torch.zeros(8192, 8, 128, dtype=torch.bfloat16), torch.zeros(8192, 8, 128, dtype=torch.bfloat16)
    for line in sys.stdin:
        n = int(line)
        q, k, v = (torch.zeros(n, heads, 128, dtype=torch.bfloat16) for heads in (32, 8, 8))
        positions, slots = torch.arange(n), torch.randperm(8192)[:n]
        times = []
        stop = time.perf_counter() + SECONDS_PER_TURN
        while len(times) < 3 or time.perf_counter() < stop:
            start = time.perf_counter()
            op(
                q,
                k,
                v,
                positions,
                slots,
                *pools,
                head_dim=128,
                num_qo_heads=32,
                num_kv_heads=8,
                rope_base=500000.0,
            )
            times.append(time.perf_counter() - start)
        print(statistics.median(times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", help="root of a checkout")
    parser.add_argument("after", help="root of another")
    roots = parser.parse_args()
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for root in (roots.before, roots.after)
    ]

    def ask(process: subprocess.Popen[str], num_tokens: int) -> float:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{num_tokens}\n")
        return float(process.stdout.readline())

    print("| num_tokens | before, µs | after, µs | after / before | middle half |")
    print("|---|---|---|---|---|")
    for n in NUM_TOKENS:
        rounds = [[ask(process, n) for process in workers] for _ in range(ROUNDS)][1:]
        before, after = (1e6 * statistics.median(times) for times in zip(*rounds, strict=True))
        low, ratio, high = statistics.quantiles((b / a for a, b in rounds), n=4)
        print(f"| {n} | {before:.2f} | {after:.2f} | {ratio:.3f} | {low:.3f}-{high:.3f} |", flush=True)
    for process in workers:
        process.communicate()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2])
    else:
        main()
