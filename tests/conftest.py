from collections.abc import Callable, Iterator

import pytest
import torch

import torch_ropepool  # noqa: F401  (registers the ops before any test module looks them up)


@pytest.fixture
def set_num_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
