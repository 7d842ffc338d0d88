"""`python -m torch_ropepool`: what is here, and a self-test of it. Exit status 1 if anything is wrong."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from typing import Any

import torch

from . import __version__, library_path, selftest
from ._library import LIBRARY

BACKENDS = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS"}  # a device's type and its dispatch key
FAILURES_SHOWN = 5


def has_kernels(device_type: str) -> bool:
    """Whether the loaded libraries hold kernels for a type of device."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has("ropepool::_rope_pool_fused", BACKENDS[device_type]))


def devices() -> list[str]:
    """Devices of this machine that torch can use, whether or not there are kernels for them."""
    return (
        ["cpu"]
        + ["mps"] * torch.backends.mps.is_available()
        + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    )


def environment() -> dict[str, str]:
    mac = platform.mac_ver()[0]
    return {
        "torch_ropepool": __version__,
        "library": str(library_path()),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"macOS {mac} {platform.machine()}" if mac else platform.platform(),
        "kernels for": ", ".join(name for name in BACKENDS if has_kernels(name)),
        "CPU instruction set": LIBRARY.rope_pool_cpu_isa().decode(),
        "devices": ", ".join(devices()),
    }


def report_on(device: str, with_timing: bool) -> dict[str, Any]:
    rows = selftest.check_device(device)
    report: dict[str, Any] = {
        "device": device,
        "checks": [
            {"kind": r.kind, "count": r.count, "failures": r.failures, "may fail": r.is_allowed_to_fail}
            for r in rows
        ],
        "timings": [],
    }
    try:
        for num_tokens, ours, eager in selftest.timings(device) if with_timing else []:
            report["timings"].append(
                {"num_tokens": num_tokens, "seconds": ours, "seconds of eager torch": eager}
            )
    except Exception as error:  # the checks are worth more
        report["no timings"] = f"{type(error).__name__}: {error}"
    return report


def is_good(report: dict[str, Any]) -> bool:
    return not any(check["failures"] and not check["may fail"] for check in report["checks"])


def print_report(report: dict[str, Any]) -> None:
    print(f"\n{report['device']}")
    for check in report["checks"]:
        bad = len(check["failures"])
        verdict = "ok" if bad == 0 else f"{bad} differ" if check["may fail"] else f"{bad} FAILED"
        print(f"  {check['kind']:<44} {check['count']:>5} calls   {verdict}")
        for failure in check["failures"][:FAILURES_SHOWN]:
            print(f"      {failure}")
    if "no timings" in report:
        print(f"  no timings: {report['no timings']}")
    for row in report["timings"]:
        ours, eager = 1e6 * row["seconds"], 1e6 * row["seconds of eager torch"]
        print(
            f"  {row['num_tokens']:>5} tokens: {ours:9.1f} us a call, eager torch {eager:9.1f} us"
            f" ({eager / ours:.1f} times)"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_ropepool", description=__doc__)
    parser.add_argument("--device", action="append", help="test only this device; may be given again")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--no-timing", action="store_true", help="only the checks")
    options = parser.parse_args()

    for name in options.device or []:
        if torch.device(name).type not in BACKENDS:
            parser.error(f"--device must be one of {', '.join(BACKENDS)}, got {name}")
    here = environment()
    if not options.json:
        for name, value in here.items():
            print(f"{name + ':':<21} {value}")
    reports = []
    for device in options.device or [d for d in devices() if has_kernels(torch.device(d).type)]:
        reports.append(report_on(device, not options.no_timing))
        if not options.json:
            print_report(reports[-1])
    good = all(is_good(report) for report in reports)
    if options.json:
        print(json.dumps({"environment": here, "reports": reports, "good": good}, indent=1))
    else:
        print("\nAll good." if good else "\nSOMETHING IS WRONG: please report all of the above.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
