"""TORCH_ROPEPOOL_SANITIZE, which `make asan`, `make ubsan` and `make tsan` set."""

import build_config
import pytest


@pytest.mark.parametrize("name", build_config.SANITIZERS)
def test_sanitizer_args(monkeypatch, name):
    monkeypatch.setenv("TORCH_ROPEPOOL_SANITIZE", name)
    assert f"-fsanitize={name}" in build_config.sanitizer_args("linux")
    with pytest.raises(SystemExit, match=f"works on Linux only, got {name}"):
        build_config.sanitizer_args("darwin")


def test_no_sanitizer(monkeypatch):
    monkeypatch.delenv("TORCH_ROPEPOOL_SANITIZE", raising=False)
    assert build_config.sanitizer_args("linux") == []
    monkeypatch.setenv("TORCH_ROPEPOOL_SANITIZE", "")
    assert build_config.sanitizer_args("linux") == []


def test_unknown_sanitizer(monkeypatch):
    monkeypatch.setenv("TORCH_ROPEPOOL_SANITIZE", "adress")
    with pytest.raises(SystemExit, match="must be one of address, undefined, thread, got adress"):
        build_config.sanitizer_args("linux")
