"""Random calls of the ops, checked. `make fuzz` runs

    python tests/fuzz/fuzz.py --cases 200000

which prints its seed; --seed makes the same cases again, and a failing one is made small first.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections import Counter
from typing import IO

import torch
from fuzz_case import draw
from fuzz_check import check
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

BLOCK = 1000  # cases in one run of Hypothesis, which remembers each of them


def run(cases: int, how: settings, number: int | None = None, at_hand: IO[str] | None = None) -> Counter[str]:
    """Raises for the first case that is wrong. Returns how many there were of each kind.

    at_hand: a file for the case that is tried, which is what remains of it after a crash.
    """
    kinds: Counter[str] = Counter()

    @settings(how, max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def one(r: random.Random) -> None:
        case = draw(r)
        if at_hand is not None:
            at_hand.seek(0)
            at_hand.truncate()
            print(case, file=at_hand, flush=True)
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
    begin, kinds = time.monotonic(), Counter()
    with tempfile.NamedTemporaryFile("w", prefix="fuzz_case_", suffix=".txt", delete=False) as at_hand:
        print(f"seed {options.seed}; after a crash, {at_hand.name} has the case", flush=True)
        for number in range(options.seed, options.seed + -(-options.cases // BLOCK)):
            try:
                kinds += run(BLOCK, settings(phases=[Phase.generate, Phase.shrink]), number, at_hand)
            except BaseException:
                print(f"again: --cases {BLOCK} --seed {number}", flush=True)
                raise
            print(f"{kinds.total()} cases in {time.monotonic() - begin:.0f} s", flush=True)
    os.unlink(at_hand.name)
    print(f"{kinds.total()} cases, seed {options.seed}, no finding: {dict(kinds.most_common())}")


if __name__ == "__main__":
    main()
