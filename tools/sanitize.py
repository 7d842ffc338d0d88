"""Runs the tests with a sanitizer in the library: address, undefined or thread.

The library is built in a copy of the tree, build/address and so on, so that the one in place stays as it
is. torch and Python are not instrumented. What the sanitizer finds ends the run: its report is printed last.
Before that, faults are planted one at a time, each of which it must report.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import build_config
import torch
from mutation_table import CPU, FREQUENCIES, PLAN, TOKENS, Mutation, copy_tree, mutated

# Put before the compiler in PATH: what tests compile with need not be watched.
COMPILER = """#!/bin/sh
unset LD_PRELOAD
exec {compiler} "$@"
"""

RUNTIMES = {"address": "asan", "undefined": "ubsan", "thread": "tsan"}
NAMES = {"address": "AddressSanitizer", "undefined": "runtime error:", "thread": "ThreadSanitizer"}
OPTIONS = {
    # Python's own leaks are none of ours. A test asks for outputs that cannot be allocated.
    "address": ["detect_leaks=0", "allocator_may_return_null=1"],
    "undefined": ["print_stacktrace=1"],
    "thread": [
        "halt_on_error=1",
        "die_after_fork=0",
        "allocator_may_return_null=1",
        f"suppressions={build_config.ROOT.resolve()}/tests/data/tsan_suppressions.txt",
    ],
}
PATHS = "tests/test_refusals.py::test_messages_have_no_path_of_the_build_machine"
FAILING_STEPS = "tests/test_failures.py::test_a_step_that_fails_changes_nothing"
LEFT_OUT = {
    # What a sanitizer prints names the sources' folder. It has an allocator of its own, too, but for one.
    "address": (PATHS, FAILING_STEPS),
    "undefined": (PATHS,),
    "thread": (PATHS, FAILING_STEPS),
}
# Not here: tests of torch's compiler, of models and of the Metal emulator. They run the same kernels, and
# neither what they generate nor the emulator is instrumented.
TESTS = ("contract", "contract_parity", "contract_variants", "failures", "guard_pages", "library", "opcheck")
TESTS += ("overlap", "pool", "processes", "reference", "refusals", "rope_math", "rope_pool", "selftest")
TESTS += ("variants",)

ROPE_POOL = "tests/test_rope_pool.py"
PLANTED = {
    "address": [
        Mutation(
            "a row's copy a byte too long",
            TOKENS,
            "std::memcpy(out, in, static_cast<std::size_t>(count) * sizeof(Storage));",
            "std::memcpy(out, in, static_cast<std::size_t>(count) * sizeof(Storage) + 1);",
            (f"{ROPE_POOL}::test_dtypes",),
        ),
        Mutation(
            "a word read as two",
            TOKENS,
            "  u32 word;\n  std::memcpy(&word, x, sizeof word);\n  return word;",
            "  u64 words;\n  std::memcpy(&words, x, sizeof words);\n"
            "  return static_cast<u32>(words) ^ (words >> 32 == 0x12345678u);",
            (f"{ROPE_POOL}::test_dtypes",),
        ),
    ],
    "undefined": [
        Mutation(
            "a product that overflows",
            PLAN,
            "(static_cast<std::size_t>(slot) * 0x9e3779b97f4a7c15u >> 32)",
            "(static_cast<std::size_t>((slot + 1) * 0x7e3779b97f4a7c15) >> 32)",
            (f"{ROPE_POOL}::test_the_later_token_of_a_slot_stays",),
        ),
    ],
    "thread": [
        Mutation(
            "a cache without its lock",
            FREQUENCIES,
            "const std::lock_guard<std::mutex> lock(mutex);",
            "",
            (f"{ROPE_POOL}::test_threads_race_for_the_first_use_of_a_base",),
        ),
        Mutation(
            "angles that threads share",
            TOKENS,
            "  Tile tile;\n",
            "  static Tile tile;\n",
            (f"{ROPE_POOL}::test_same_bits_at_any_thread_count",),
        ),
        Mutation(
            "angles that callers share",
            TOKENS,
            "  Tile tile;\n",
            "  static Tile tile;\n",
            (f"{ROPE_POOL}::test_threads_on_disjoint_slots_of_one_pool",),
        ),
        Mutation(
            "two threads that write one row",
            CPU,
            "if (!increasing) {",
            "if (false) {",
            (f"{ROPE_POOL}::test_the_later_token_of_a_slot_stays",),
        ),
    ],
}


def library(name: str) -> str:
    """The path of a library of the compiler's."""
    command = (os.environ.get("CXX", "g++"), f"-print-file-name=lib{name}.so")
    path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    if not Path(path).is_absolute():
        sys.exit(f"the compiler has no lib{name}.so")
    return path


def openmp_for_tsan(root: Path) -> str:
    """A library that makes torch's parallel loops known to ThreadSanitizer."""
    path = root / "libopenmp_for_tsan.so"
    source = root / "tests/data/openmp_for_tsan.cpp"
    command = (os.environ.get("CXX", "g++"), "-O1", "-shared", "-fPIC", "-o", path, source, "-ldl")
    subprocess.run(command, check=True)
    return str(path)


class Tree:
    """A copy of the tree whose library has the sanitizer in it."""

    def __init__(self, sanitizer: str) -> None:
        self.sanitizer = sanitizer
        self.root = build_config.ROOT.resolve() / "build" / sanitizer
        for folder in ("tests", "torch_ropepool/csrc"):  # files that are gone from the tree
            shutil.rmtree(self.root / folder, ignore_errors=True)
        copy_tree(self.root)
        compilers = self.root / "build/bin"
        compilers.mkdir(parents=True, exist_ok=True)
        for name in ("c++", "g++"):
            (compilers / name).write_text(COMPILER.format(compiler=shutil.which(os.environ.get("CXX", name))))
            (compilers / name).chmod(0o755)
        folders = [str(compilers), str(Path(sys.executable).parent), os.environ["PATH"]]  # ninja
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join(folders),
            "PYTHONPATH": str(self.root),
            "OMP_NUM_THREADS": "1",
            "TORCH_ROPEPOOL_CUDA": "0",
            "TORCH_ROPEPOOL_SANITIZE": sanitizer,
        }
        self.environment.pop("CXX", None)

    def build(self) -> None:
        command = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")
        done = subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stdout + done.stderr)

    def test(self, *arguments: str, **how: object) -> subprocess.CompletedProcess[str]:
        runtime = RUNTIMES[self.sanitizer]
        # The runtime comes before Python, with the C++ library whose exceptions it watches.
        preloaded = [library(runtime), library("stdc++")]
        if self.sanitizer == "thread":
            preloaded.append(openmp_for_tsan(self.root))
        environment = {
            **self.environment,
            "LD_PRELOAD": " ".join(preloaded),
            # A program's own path to libraries is not known to AddressSanitizer's dlopen.
            "LD_LIBRARY_PATH": str(Path(torch.__file__).parent / "lib"),
            f"{runtime.upper()}_OPTIONS": ":".join(OPTIONS[self.sanitizer]),
        }
        pytest = (sys.executable, "-m", "pytest", "-x", "-v", "--capture=sys", "-p", "no:cacheprovider")
        return subprocess.run((*pytest, *arguments), cwd=self.root, env=environment, text=True, **how)

    def plant(self, fault: Mutation) -> None:
        """Ends the run if the fault is not reported."""
        path = self.root / fault.file
        text = path.read_text()
        path.write_text(mutated(fault, self.root))
        self.build()
        done = self.test(*fault.tests, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        path.write_text(text)
        if done.returncode == 0 or NAMES[self.sanitizer] not in done.stdout:
            sys.exit(f"planted, and not reported: {fault.name}\n{done.stdout[-4000:]}")
        print(f"planted, and reported: {fault.name}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sanitizer", choices=RUNTIMES)
    parser.add_argument(
        "tests", nargs=argparse.REMAINDER, help="pytest's arguments, in place of planted faults and TESTS"
    )
    options = parser.parse_args()
    tree = Tree(options.sanitizer)
    if not options.tests:
        for fault in PLANTED[options.sanitizer]:
            tree.plant(fault)
    tree.build()
    left_out = [f"--deselect={test}" for test in LEFT_OUT[options.sanitizer]]
    tests = options.tests or ["tests/fuzz", *(f"tests/test_{name}.py" for name in TESTS)]
    return tree.test(*left_out, *tests).returncode


if __name__ == "__main__":
    sys.exit(main())
