"""`python -m torch_ropepool`: its report, and that it notices what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from torch_ropepool import __main__, selftest


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch_ropepool", "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_report():
    result = run("--no-timing")
    assert result.returncode == 0, result.stderr
    text = re.sub(r"^(\w[\w ]*: +).*$", r"\1...", result.stdout, flags=re.MULTILINE)
    assert_expected_inline(
        text,
        """\
torch_ropepool:       ...
library:              ...
torch:                ...
Python:               ...
system:               ...
kernels for:          ...
CPU instruction set:  ...
devices:              ...

cpu
  contract                                        14 calls   ok
  accuracy against float64                       246 calls   ok
  slots out of range                               1 calls   ok
  repeated slots, deterministic algorithms         1 calls   ok

All good.
""",
    )


def test_report_as_json():
    result = run("--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["good"] is True
    assert report["environment"]["torch"] == torch.__version__
    (cpu,) = report["reports"]
    assert cpu["device"] == "cpu"
    assert all(check["count"] > 0 and check["failures"] == [] for check in cpu["checks"])
    assert [row["num_tokens"] for row in cpu["timings"]] == [1, 64, 1024]


def test_an_unknown_device_is_refused():
    result = subprocess.run(
        [sys.executable, "-m", "torch_ropepool", "--device", "meta"], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "--device must be one of cpu, cuda, mps, got meta" in result.stderr


# ---- A kernel with a fault, in place of the device's


def cpu_kernel(op: str, args: dict[str, Any]) -> Any:
    """The CPU's, but out of range as on a GPU: the token is not stored."""
    slots = args["slots"]
    pool_size = len(args["k_pool"]) * (args.get("page_size") or 1)
    if slots.numel() > 0 and int(slots.max()) >= pool_size:
        slots = slots.where(slots < pool_size, -1)
    return selftest.call_op(op, {**args, "slots": slots})


def wrong_position(op, args):
    return cpu_kernel(op, {**args, "positions": args["positions"] + 1})


def stores_nothing(op, args):
    return cpu_kernel(op, {**args, "slots": torch.full_like(args["slots"], -1)})


def unrotated_k(op, args):
    before = args["k"].clone()
    result = cpu_kernel(op, args)
    (args["k"] if op == "rope_pool_fused_" else result[1]).copy_(before)
    return result


def stores_out_of_range(op, args):
    return cpu_kernel(op, {**args, "slots": args["slots"].clamp(max=len(args["k_pool"]) - 1)})


def accepts_everything(op, args):
    try:
        return cpu_kernel(op, args)
    except ValueError:
        return args["q"].clone(), args["k"].clone(), args["k_pool"], args["v_pool"]


def failed_kinds(call: selftest.Call) -> set[str]:
    return {
        row.kind.split(":")[0] for row in selftest.check_device("cpu", call, is_cpu=False) if row.failures
    }


def test_a_right_kernel_passes():
    assert failed_kinds(cpu_kernel) == set()


@pytest.mark.parametrize(
    ("kernel", "kinds"),
    [
        (wrong_position, {"bits as on the CPU", "accuracy against float64"}),
        (stores_nothing, {"bits as on the CPU"}),
        (unrotated_k, {"bits as on the CPU", "accuracy against float64"}),
        (stores_out_of_range, {"slots out of range"}),
        (accepts_everything, {"contract"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_is_noticed(kernel, kinds):
    assert kinds <= failed_kinds(kernel)


def test_what_may_fail_does_not_decide():
    flushed = {"kind": selftest.SUBNORMALS, "count": 9, "failures": ["flushed"], "may fail": True}
    assert __main__.is_good({"checks": [flushed]})
    assert not __main__.is_good({"checks": [{**flushed, "may fail": False}]})
