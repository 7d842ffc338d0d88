"""The README's Python examples run as written, and its page of faults names tests that exist."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
README = TESTS.parent / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_there_are_three_examples():
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize("example", EXAMPLES, ids=["eager", "compile", "export"])
def test_example_runs(example):
    exec(compile(example, str(README), "exec"), {})


# ---- What can go wrong and what happens


def faults() -> list[list[str]]:
    """The rows of the page's table, without those that are headings."""
    page = README.read_text().split("## What can go wrong and what happens\n")[1].split("\n## ")[0]
    lines = [line for line in page.splitlines() if line.startswith("| ")][1:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if not row[0].startswith("**")]


def named_tests() -> list[str]:
    """As pytest's ids: file and function."""
    names = sorted({name for row in faults() for name in re.findall(r"`(test_\w+::test_\w+)`", row[-1])})
    return ["tests/{}.py::{}".format(*name.split("::")) for name in names]


def test_every_fault_says_what_happens_and_names_a_test():
    assert len(faults()) > 30
    for fault, *places, shown_by in faults():
        assert len(places) == 5 and any(places), fault
        assert re.fullmatch(r"`test_\w+::test_\w+`( `test_\w+::test_\w+`)*", shown_by), fault


def test_every_named_test_is_collected():
    names = named_tests()
    if not torch.cuda.is_available():  # its file is not collected then
        tree = ast.parse((TESTS / "test_rope_pool_cuda.py").read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        on_cuda = [name for name in names if name.startswith("tests/test_rope_pool_cuda.py")]
        assert {name.split("::")[1] for name in on_cuda} - functions == set()
        names = [name for name in names if name not in on_cuda]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *names]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # the package that is tested, not the tree's
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    collected = {line.split("[")[0] for line in done.stdout.splitlines() if "::" in line}
    assert set(names) - collected == set()
