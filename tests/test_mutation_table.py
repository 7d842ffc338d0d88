"""The faults of tools/mutation_table.py fit this tree. That tests catch them, `make mutations` shows."""

import mutation_table
import pytest


@pytest.mark.parametrize("mutation", mutation_table.MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fault_can_be_planted(mutation):
    text = (mutation_table.ROOT / mutation.file).read_text()
    assert mutation_table.mutated(mutation, mutation_table.ROOT) != text
    for test in mutation.tests:
        assert (mutation_table.ROOT / test).is_file()


def test_a_fault_that_fits_nowhere_or_twice_is_an_error(tmp_path):
    mutation = mutation_table.Mutation("a fault", "file", "old", "new", ())
    for text in ("none", "old old"):
        (tmp_path / "file").write_text(text)
        with pytest.raises(SystemExit, match="a fault: file must have its text once"):
            mutation_table.mutated(mutation, tmp_path)
