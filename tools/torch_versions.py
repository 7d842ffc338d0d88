"""One wheel on many torch releases: builds it once, tests it on each, prints a table.

The wheel is built with the torch of this Python. Each release then gets an environment of its own, with
torch as pip installs it, the wheel, and what the tests need; the tests run against the installed wheel.
On Linux pip's torch is a CUDA build: about 4 GB to download and 7 GB on disk, needing no GPU. So an
environment is deleted after its run; --keep leaves it, and the next run takes it up.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-torch"
OLDEST, NEWEST = 10, 14  # 2.10 to 2.14

# The tests of the op. The others are about transformers models, peers, and arithmetic without torch.
TESTS = [
    *("library", "contract", "contract_variants", "contract_parity", "rope_pool", "variants", "overlap"),
    *("opcheck", "tracing", "refusals", "aot_inductor", "tensor_parallel", "reference", "pool", "readme"),
]
# setuptools and ninja: a test builds a wheel with the headers of the release that it runs on.
REQUIREMENTS = ("pytest>=9", "expecttest", "numpy", "cmake", "ninja", "setuptools>=77")


@dataclass
class Result:
    """What came out of one release."""

    version: str
    loads: bool = False
    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    seconds: dict[str, float] = field(default_factory=dict)
    megabytes: int = 0
    pytest_status: int = -1

    @property
    def good(self) -> bool:
        return self.loads and self.pytest_status == 0


def run(*command: str | Path, **options: object) -> None:
    subprocess.run(command, check=True, cwd=ROOT, **options)


def build_wheel(folder: Path) -> Path:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja
    shutil.rmtree(folder, ignore_errors=True)
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    run(*pip, "-w", folder, ".", env={**os.environ, "PATH": path})
    (wheel,) = folder.glob("*.whl")
    return wheel


def make_environment(environment: Path, python: str, version: str, wheel: Path) -> None:
    if not environment.exists():
        run(python, "-m", "venv", environment)
    pip = (environment / "bin/python", "-m", "pip", "install", "-q", "--no-cache-dir", "--no-compile")
    run(*pip, f"torch=={version}.*" if version.count(".") == 1 else f"torch=={version}", *REQUIREMENTS, wheel)
    run(*pip, "--force-reinstall", "--no-deps", wheel)  # where an environment was kept


CALL = """
import torch, torch_ropepool
pool = torch_ropepool.KVPool(num_layers=1, pool_size=4, num_kv_heads=1, head_dim=4)
q = k = v = torch.ones(1, 1, 4)
slots, positions = pool.alloc(1), torch.tensor([7])
arguments = {"head_dim": 4, "num_qo_heads": 1, "num_kv_heads": 1, "rope_base": 10000.0}
torch_ropepool.rope_pool_fused(q, k, v, positions, slots, pool.k(0), pool.v(0), **arguments)
print(torch.__version__, torch_ropepool.__file__)
"""


def load(environment: Path) -> str | None:
    """The torch release, where the installed package works: run where the tree is not on the path."""
    command = [environment / "bin/python", "-c", CALL]
    result = subprocess.run(command, cwd=environment, stdout=subprocess.PIPE, text=True)
    if result.returncode != 0:
        return None
    version, path = result.stdout.split()
    assert Path(path).is_relative_to(environment), path
    return version


def run_tests(environment: Path, tests: list[str], result: Result) -> None:
    report = environment / "report.xml"
    files = [f"tests/test_{name}.py" for name in tests]
    # Not `python -m pytest`, which would put the tree before the installed package.
    command = [environment / "bin/pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
    path = os.pathsep.join([str(environment / "bin"), os.environ["PATH"]])
    result.pytest_status = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}).returncode
    suite = ET.parse(report).getroot()
    tested = suite.find(".//property[@name='torch_ropepool']")
    assert tested is not None and Path(tested.get("value", "")).is_relative_to(environment), "not the wheel"
    for case in suite.iter("testcase"):
        (name,) = re.findall(r"test_(\w+)", case.get("classname") or case.get("name", ""))[:1]
        kinds = {child.tag for child in case}
        kind = next((kind for kind in ("failure", "error", "skipped") if kind in kinds), "passed")
        result.counts[name][kind] += 1


def size_of(folder: Path) -> int:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files) // 10**6


def python_version(python: str) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def run_release(version: str, python: str, wheel: Path, tests: list[str], keep: bool) -> Result:
    environment = FOLDER / f"torch{version}-python{python_version(python)}"
    result = Result(version)
    print(f"\n==== {environment.name}", flush=True)
    try:
        start = time.monotonic()
        make_environment(environment, python, version, wheel)
        result.seconds["install"] = time.monotonic() - start
        result.megabytes = size_of(environment)
        loaded = load(environment)
        result.loads = loaded is not None
        result.version = loaded or version
        start = time.monotonic()
        run_tests(environment, tests, result)
        result.seconds["tests"] = time.monotonic() - start
    finally:
        if not keep:
            shutil.rmtree(environment, ignore_errors=True)
    return result


def cell(counts: Counter[str]) -> str:
    failed = counts["failure"] + counts["error"]
    parts = [str(counts["passed"])]
    parts += [f"{failed} FAILED"] if failed else []
    parts += [f"{counts['skipped']} skipped"] if counts["skipped"] else []
    return ", ".join(parts)


def table(results: list[Result], tests: list[str]) -> str:
    rows = [
        ["torch", *(result.version for result in results)],
        ["loads", *("yes" if result.loads else "NO" for result in results)],
        *([f"test_{test}", *(cell(result.counts[test]) for result in results)] for test in tests),
        *([what, *(f"{r.seconds.get(what, 0):.0f} s" for r in results)] for what in ("install", "tests")),
        ["on disk", *(f"{result.megabytes / 1000:.1f} GB" for result in results)],
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("versions", nargs="*", default=[f"2.{minor}" for minor in range(OLDEST, NEWEST + 1)])
    parser.add_argument("--tests", nargs="+", default=TESTS, choices=TESTS, metavar="NAME")
    parser.add_argument("--python", default=sys.executable, help="of the environments; any can use the wheel")
    parser.add_argument("--keep", action="store_true", help="leave the environments for the next run")
    options = parser.parse_args()

    wheel = build_wheel(FOLDER / "wheel")
    results = [
        run_release(version, options.python, wheel, options.tests, options.keep)
        for version in options.versions
    ]
    print(f"\n{wheel.name} on Python {python_version(options.python)}, passed tests:\n")
    print(table(results, options.tests))
    return 0 if all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
