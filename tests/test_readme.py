"""The README's Python examples run as written."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_there_are_three_examples():
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize("example", EXAMPLES, ids=["eager", "compile", "export"])
def test_example_runs(example):
    exec(compile(example, str(README), "exec"), {})
