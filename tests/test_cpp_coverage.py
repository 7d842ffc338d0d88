"""tools/cpp_coverage.py: what gcov counted becomes a table, and lines that are not run need a reason."""

from __future__ import annotations

import shutil
import subprocess

import cpp_coverage
import pytest
from cpp_coverage import Reason

FILE = "torch_ropepool/csrc/a.cpp"
SOURCE = """\
template <int N>
int sign(int x) {
  if (x < 0) return -N;
  return N;
}
int main(int argc, char**) {
  if (argc > 5) {
    return 1;
  }
  return sign<2>(argc) + sign<3>(-argc) != -1;
}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    if shutil.which("gcov") is None:
        pytest.skip("no gcov here")
    root = tmp_path_factory.mktemp("coverage")
    (root / FILE).parent.mkdir(parents=True)
    (root / FILE).write_text(SOURCE)
    subprocess.run(["g++", "--coverage", "-O0", "-o", "a", FILE], cwd=root, check=True)
    subprocess.run(["./a"], cwd=root, check=True)
    return root


def test_instantiations_count_together(root):
    counts = cpp_coverage.read_counts(root)
    assert list(counts) == [FILE]
    assert counts[FILE].uncovered() == [8]
    assert counts[FILE].lines[3] == 2
    assert cpp_coverage.table(counts)[-1] == "| all | 6 of 7 | 85.7 % | 3 of 4 | 75.0 % |"


def test_a_line_that_is_not_run_needs_a_reason_and_no_other_has_one(root):
    counts = cpp_coverage.read_counts(root)
    _, wrong = cpp_coverage.faults(counts, [], root)
    assert wrong == [f"{FILE}:8 is not run, and nothing says why: return 1;"]
    report, wrong = cpp_coverage.faults(counts, [Reason(FILE, "too many", ("return 1;",))], root)
    assert report == [f"{FILE}:8: return 1;\n    too many"]
    assert wrong == []
    for line in ("return N;", "return 2;"):
        _, wrong = cpp_coverage.faults(counts, [Reason(FILE, "too many", ("return 1;", line))], root)
        assert wrong == [f"{FILE}: the line is run, or is not there, and explained: {line}"]
