"""Random calls of the ops, checked. `make fuzz` runs

    python tests/fuzz/fuzz.py --cases 200000

which prints its seed; --seed makes the same cases again, and a failing one is made small first.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter

import torch
from fuzz_case import draw
from fuzz_check import check
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

BLOCK = 1000  # cases in one run of Hypothesis, which remembers each of them


def run(cases: int, how: settings, number: int | None = None) -> Counter[str]:
    """Raises for the first case that is wrong. Returns how many there were of each kind."""
    kinds: Counter[str] = Counter()

    @settings(how, max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def one(r: random.Random) -> None:
        case = draw(r)
        try:
            kinds[check(case)] += 1
        except Exception as error:
            error.add_note(str(case))
            raise

    if number is not None:
        one = seed(number)(one)
    one()
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args()
    torch.set_num_threads(1)  # the oracle's tensors are small
    print(f"seed {options.seed}", flush=True)
    begin, kinds = time.monotonic(), Counter()
    for block in range(-(-options.cases // BLOCK)):
        kinds += run(BLOCK, settings(phases=[Phase.generate, Phase.shrink]), options.seed + block)
        print(f"{kinds.total()} cases in {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{kinds.total()} cases, seed {options.seed}, no finding: {dict(kinds.most_common())}")


if __name__ == "__main__":
    main()
