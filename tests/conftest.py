from collections.abc import Iterator

import pytest
import torch

import torch_ropepool  # registers the ops before any test module looks them up


@pytest.fixture(scope="session", autouse=True)
def what_is_tested(record_testsuite_property) -> None:
    """For tools/torch_versions.py, into the XML report."""
    record_testsuite_property("torch", torch.__version__)
    record_testsuite_property("torch_ropepool", torch_ropepool.__file__)


collect_ignore = [] if torch.cuda.is_available() else ["test_rope_pool_cuda.py"]


def pytest_report_header() -> str:
    if torch.cuda.is_available():
        return f"CUDA: {torch.cuda.get_device_name()}"
    return "CUDA: no device. Its tests are left out; the kernel's body runs on the Metal emulator."


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests of threads say how many. Elsewhere the oracle's small torch ops are slower with more."""
    from checks import threads

    with threads(1):
        yield


def runs_on_mps(params: dict[str, object]) -> bool:
    """Whether the MPS backend can do what a test of the CPU's asks, and the emulator in good time."""
    refused = torch.float64 in params.values()
    repeats = params.get("argument") == "slots" and params.get("stride") == 0  # a GPU may mix the rows
    return not (refused or repeats or params.get("num_tokens") == 300)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The CPU's tests that test_rope_pool_mps.py imports run again there, where they can."""
    left_out = [
        item
        for item in items
        if item.path.stem == "test_rope_pool_mps"
        and not runs_on_mps(getattr(getattr(item, "callspec", None), "params", {}))
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]
