"""The faults that tools/sanitize.py plants fit this tree. That each is reported, `make asan` and so on show."""

import mutation_table
import pytest
import sanitize


@pytest.mark.parametrize(
    "fault", [f for faults in sanitize.PLANTED.values() for f in faults], ids=lambda f: f.name
)
def test_a_fault_can_be_planted(fault):
    mutation_table.mutated(fault, mutation_table.ROOT)
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (mutation_table.ROOT / file).read_text()


def test_the_tests_are_there():
    left_out = [test for tests in sanitize.LEFT_OUT.values() for test in tests]
    for test in [*left_out, *(f"tests/test_{name}.py" for name in sanitize.TESTS)]:
        file, _, name = test.partition("::")
        assert f"def {name}" in (mutation_table.ROOT / file).read_text()


def test_every_sanitizer_has_a_fault():
    assert all(sanitize.PLANTED[name] for name in sanitize.RUNTIMES)
