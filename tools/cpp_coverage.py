"""Which lines and branches of the compiled code the tests run: a table, and each line that they do not.

The library and the emulated Metal backend are built in a copy of the tree, build/coverage, by gcc with
--coverage and without optimisation, and the tests run there. NOT_RUN says why a line is not run. A line that
is not run and not there is an error, and so is one that is there and run.
Not counted: the kernel's body on GPUs, which the emulator runs from a translation, and CUDA's host code.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import build_config
from mutation_table import copy_tree

ROOT = build_config.ROOT.resolve() / "build" / "coverage"
SOURCES = ("torch_ropepool/csrc/", "torch_ropepool/metal/")
# Put before the compiler in PATH, so that setup.py and the emulator build with it.
COMPILER = """#!/bin/sh
exec {compiler} "$@" --coverage -O0 -fprofile-update=atomic
"""
LEFT_OUT = (
    # It looks for the sources' folder, which the names of the counters' files have in them.
    "tests/test_refusals.py::test_messages_have_no_path_of_the_build_machine",
    "tests/test_cuda_library.py",  # not built here
)


class Reason(NamedTuple):
    file: str
    why: str
    lines: tuple[str, ...]  # their text


TENSOR_ARGS = "torch_ropepool/csrc/tensor_args.cpp"
NOT_RUN = [
    Reason(
        TENSOR_ARGS,
        "a tensor on MPS: the emulator's are on the CPU",
        (
            "const auto offset = static_cast<std::uint64_t>(view.storage_offset * view.itemsize);",
            "view.buffer = view.byte_address - offset;",
            "view.byte_address = offset;",
        ),
    ),
    Reason(
        TENSOR_ARGS,
        "a tensor on a device that a CPU build of torch has not",
        (
            "case DeviceType::CUDA:",
            'return "cuda" + index;',
            "case DeviceType::MPS:",
            'return "mps" + index;',
            "case DeviceType::XPU:",
            'return "xpu" + index;',
            "default:",
            'return "device type " + std::to_string(tensor.device_type) + index;',
        ),
    ),
    Reason(
        "torch_ropepool/csrc/gpu_tables.cpp",
        "what gcov counts there is the vector's end where there is no memory for it",
        ("}",),
    ),
    Reason(
        "torch_ropepool/metal/rope_pool_mps.cpp",
        "what gcov counts there is the lock's end where the command block throws; torch's does not",
        ("const AOTITorchError status = [&] {",),
    ),
]


@dataclass
class Counts:
    """Of one source file, over all that it was compiled into: templates, instruction sets, libraries."""

    lines: Counter[int] = field(default_factory=Counter)
    branches: Counter[tuple[int, int, int]] = field(default_factory=Counter)  # line, of how many, which

    def add(self, line: dict) -> None:
        number = line["line_number"]
        self.lines[number] += line["count"]
        ways = [way for way in line["branches"] if not way["throw"]]
        for i, way in enumerate(ways):
            self.branches[number, len(ways), i] += way["count"]

    def uncovered(self) -> list[int]:
        return sorted(number for number, count in self.lines.items() if count == 0)


def read_counts(root: Path) -> dict[str, Counts]:
    result: dict[str, Counts] = defaultdict(Counts)
    for notes in sorted(root.rglob("*.gcno")):
        command = ("gcov", "--json-format", "--stdout", "--branch-probabilities", str(notes))
        text = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
        for file in json.loads(text)["files"]:
            name = os.path.relpath(root / file["file"], root)
            if not name.startswith(SOURCES):
                continue
            for line in file["lines"]:
                result[name].add(line)
    return result


def faults(counts: dict[str, Counts], reasons: list[Reason], root: Path) -> tuple[list[str], list[str]]:
    """The lines that are not run, each with its reason, and what is wrong with them."""
    explained: dict[tuple[str, str], list[str]] = defaultdict(list)
    for reason in reasons:
        for line in reason.lines:
            explained[reason.file, line].append(reason.why)
    report, wrong = [], []
    for name, of_file in sorted(counts.items()):
        text = (root / name).read_text().splitlines()
        for number in of_file.uncovered():
            line = text[number - 1].strip()
            whys = explained[name, line]
            if not whys:
                wrong.append(f"{name}:{number} is not run, and nothing says why: {line}")
            report.append(f"{name}:{number}: {line}\n    {whys.pop() if whys else '?'}")
    for (name, line), whys in explained.items():
        wrong += [f"{name}: the line is run, or is not there, and explained: {line}" for _ in whys]
    return report, wrong


def table(counts: dict[str, Counts]) -> list[str]:
    def row(name: str, lines: list[int], branches: list[int]) -> str:
        parts = [
            f"{sum(count > 0 for count in part)} of {len(part)} | {percent(part)}"
            for part in (lines, branches)
        ]
        return f"| {name} | {' | '.join(parts)} |"

    def percent(part: list[int]) -> str:
        return f"{100 * sum(count > 0 for count in part) / len(part):.1f} %" if part else ""

    rows = ["| File | Lines | | Branches | |", "|---|---|---|---|---|"]
    lines, branches = [], []
    for name, of_file in sorted(counts.items()):
        rows.append(row(name, [*of_file.lines.values()], [*of_file.branches.values()]))
        lines += of_file.lines.values()
        branches += of_file.branches.values()
    return [*rows, row("all", lines, branches)]


def run_tests(arguments: list[str]) -> int:
    for folder in ("tests", "torch_ropepool/csrc", "build"):  # files that are gone, and counts
        shutil.rmtree(ROOT / folder, ignore_errors=True)
    copy_tree(ROOT)
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    for name in ("c++", "g++"):
        path = ROOT / "build/bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(COMPILER.format(compiler=compiler))
        path.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # ninja
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("", "tools", "tests")),
        "TORCH_ROPEPOOL_CUDA": "0",
    }
    environment.pop("CXX", None)
    building = {**environment, "PATH": os.pathsep.join([str(ROOT / "build/bin"), environment["PATH"]])}
    runtime = "from metal_emulator.compiler import *; build_set_arg_bytes(build_runtime())"  # not counted
    emulator = "import emulated_mps as e; e.build(); e.build(set_arg_bytes=True)"
    library = ("setup.py", "-q", "build_ext", "--inplace")
    for command, how in ((("-c", runtime), environment), (library, building), (("-c", emulator), building)):
        subprocess.run((sys.executable, *command), cwd=ROOT, env=how, check=True)
    pytest = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
    left_out = [f"--deselect={test}" for test in LEFT_OUT]
    return subprocess.run((*pytest, *left_out, *arguments), cwd=ROOT, env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-run", action="store_true", help="only print what the last run counted")
    parser.add_argument("tests", nargs=argparse.REMAINDER, help="pytest's arguments")
    options = parser.parse_args()
    arguments = options.tests or ["-n", "auto", "--maxprocesses", "8", "--dist", "loadfile"]
    if not options.no_run and (status := run_tests(arguments)):
        return status
    counts = read_counts(ROOT)
    report, wrong = faults(counts, NOT_RUN, ROOT)
    print("\n".join([*table(counts), "", *report, "", *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
