"""A call that fails in the middle, or that is interrupted, leaves the pools whole."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checks import check, threads
from sample import OPS, Sample, bits, make_sample

import torch_ropepool

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD, and signals")


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    folders = [Path(torch_ropepool.__file__).parents[1], HERE]
    path = os.pathsep.join(str(folder) for folder in folders)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# ---- Allocations, and what the op asks of torch


def kinds_of_calls() -> dict[str, Sample]:
    many = make_sample(300, pool_size=300)
    return {
        "few tokens": make_sample(),
        "first use of a base": make_sample(),
        "many tokens, slots that repeat": many.with_(slots=torch.arange(300) % 7),
        "inv_freq": make_sample().with_(rope_base=None, inv_freq=torch.logspace(0, -4, 32)),
        "mrope": make_sample().with_(positions=torch.arange(21).view(3, 7), mrope_section=[16, 8, 8]),
        "slot out of range": make_sample().with_(slots=torch.full((7,), 32)),
    }


def attempt(call: Sample, op: str, number: int) -> tuple[Exception | None, int]:
    """Runs the call, whose step of this number fails. The error, and how many steps there were."""
    preloaded = ctypes.CDLL(None)
    error = None
    with threads(2):
        preloaded.fail_step(number)
        try:
            OPS[op](*call.args, **call.kwargs)
        except (RuntimeError, MemoryError, IndexError) as raised:
            error = raised
        left = preloaded.steps_left()
        preloaded.fail_step(0)
    return error, number - left


def fail_one_by_one() -> None:
    """In this process, where failing_steps.cpp is preloaded."""
    check(make_sample())
    bases = iter(range(20_000, 100_000))
    for name, call in kinds_of_calls().items():
        for op in OPS:

            def fresh(call: Sample = call, is_first: bool = name == "first use of a base") -> Sample:
                return call.clone().with_(rope_base=float(next(bases))) if is_first else call.clone()

            _, count = attempt(fresh(), op, 10**9)
            # A table of frequencies takes thousands. Of so many, some, and the last.
            last = range(max(1, count - 24), count + 1)
            for number in sorted({*range(1, count, 1 + count // 100), *last}):
                now = fresh()
                before = now.clone()
                error, reached = attempt(now, op, number)
                print(f"{name}, {op}, step {number} of {count}: {error!r}")
                # A table that is kept since, or another base's, takes fewer.
                assert error is not None or reached < number
                if error is None:
                    continue
                for got, want in zip(now.tensors, before.tensors, strict=True):
                    assert torch.equal(bits(got), bits(want))
            if name != "slot out of range":
                check(fresh(), op)


@pytest.fixture(scope="module")
def preload(tmp_path_factory) -> Path:
    library = tmp_path_factory.mktemp("preload") / "libfailing_steps.so"
    compiler = os.environ.get("CXX", "c++")
    source = HERE / "data" / "failing_steps.cpp"
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True
    )
    return library


def test_a_step_that_fails_changes_nothing(preload):
    process = start(
        "import torch_ropepool, test_failures; test_failures.fail_one_by_one()", LD_PRELOAD=str(preload)
    )
    out, err = process.communicate()
    assert process.returncode == 0, f"{out}\n{err}"
    assert "could not allocate an output of q's size" in out
    assert "could not allocate an output of k's size" in out
    assert "MemoryError" in out or "bad_alloc" in out
    for step in ("aoti_torch_new_tensor_handle(", "aoti_torch_as_strided(", "torch_call_dispatcher("):
        assert step in out


# ---- Ctrl-C


def call_until_interrupted() -> None:
    """Each call writes its number to every row. All rows are of one call when the interrupt arrives."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored, as in a shell's background
    call = make_sample(20_000, 2, 2, 64, pool_size=20_000)
    number = 0
    try:
        while True:
            call.v.fill_(number)
            call.run("rope_pool_fused_")
            if number == 0:
                print("calling", flush=True)
            number += 1
    except KeyboardInterrupt:
        assert call.v_pool.min() == call.v_pool.max()
        assert call.v_pool[0, 0, 0] in (number - 1, number)  # the call may be over and not yet counted
        check(make_sample())
        print("whole", flush=True)


@pytest.mark.parametrize("num_threads", ["1", "2"])
def test_an_interrupted_call_is_whole(num_threads):
    for _ in range(2):
        process = start(
            "import torch_ropepool, test_failures; test_failures.call_until_interrupted()",
            OMP_NUM_THREADS=num_threads,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "calling\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        assert (process.returncode, out) == (0, "whole\n"), err
