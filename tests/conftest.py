from collections.abc import Iterator

import pytest

import torch_ropepool  # noqa: F401  (registers the ops before any test module looks them up)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests of threads say how many. Elsewhere the oracle's small torch ops are slower with more."""
    from checks import threads

    with threads(1):
        yield
