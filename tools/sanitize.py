"""Runs the tests of the CPU kernel with a sanitizer in the library: address or undefined.

The library is built in a copy of the tree, build/address and so on, so that the one in place stays as it
is. torch and Python are not instrumented. What the sanitizer finds ends the run: its report is printed last.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import build_config
from mutation_table import copy_tree

TESTS = ("rope_pool", "rope_math", "variants", "contract", "contract_variants", "contract_parity")
TESTS += ("overlap", "pool", "refusals")
OPTIONS = {
    # Python's own leaks are none of ours. A test asks for outputs that cannot be allocated.
    "address": "detect_leaks=0:allocator_may_return_null=1",
    "undefined": "print_stacktrace=1",
}
# What a sanitizer prints names the sources' folder.
LEFT_OUT = "tests/test_refusals.py::test_messages_have_no_path_of_the_build_machine"
RUNTIMES = {"address": "asan", "undefined": "ubsan"}


def library(name: str) -> str:
    """The path of a library of the compiler's."""
    command = (os.environ.get("CXX", "g++"), f"-print-file-name=lib{name}.so")
    path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    if not Path(path).is_absolute():
        sys.exit(f"the compiler has no lib{name}.so")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sanitizer", choices=RUNTIMES)
    parser.add_argument("tests", nargs="*", help="pytest arguments, in place of the selection")
    options = parser.parse_args()
    root = build_config.ROOT.resolve() / "build" / options.sanitizer
    for folder in ("tests", "torch_ropepool/csrc"):  # files that are gone from the tree
        shutil.rmtree(root / folder, ignore_errors=True)
    copy_tree(root)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # ninja
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "TORCH_ROPEPOOL_CUDA": "0",
        "TORCH_ROPEPOOL_SANITIZE": options.sanitizer,
    }
    build = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    subprocess.run(build, cwd=root, env=environment, check=True)
    runtime = RUNTIMES[options.sanitizer]
    # The runtime comes before Python, with the C++ library whose exceptions it watches.
    environment["LD_PRELOAD"] = f"{library(runtime)} {library('stdc++')}"
    environment[f"{runtime.upper()}_OPTIONS"] = OPTIONS[options.sanitizer]
    tests = options.tests or [f"tests/test_{name}.py" for name in TESTS]
    pytest = (sys.executable, "-m", "pytest", "-x", "-v", "--capture=sys", "-p", "no:cacheprovider")
    command = (*pytest, "--deselect", LEFT_OUT, *tests)
    return subprocess.run(command, cwd=root, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
