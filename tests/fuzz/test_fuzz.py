"""A short run of the fuzzer, the same cases each time. `make fuzz` is a long one."""

from __future__ import annotations

import fuzz
from hypothesis import Phase, settings


def test_random_calls():
    kinds = fuzz.run(1200, settings(derandomize=True, phases=[Phase.generate, Phase.shrink]))
    assert {"accepted", "ValueError", "IndexError"} <= set(kinds)
