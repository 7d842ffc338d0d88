"""The checks of `make wheel-macos`, on small libraries that are built for macOS: each fault is named."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

pytest.importorskip("ziglang")

from check_wheel_macos import LIBCXX, LIBRARY, LIBSYSTEM, imported, library_faults, read_macho, wheel_faults
from wheel_macos import MACOS, TARGET, compile_source, link, write_libcxx_stub

ROOT = Path(__file__).parent.parent
NAME = Path(LIBRARY).name
OLD_TORCH = {"aoti_torch_get_dim"}
NEW_TORCH = OLD_TORCH | {"torch_mps_set_arg_bytes", "torch_new_function"}
TORCHES = {"2.10.0": OLD_TORCH, "2.14.1": NEW_TORCH}
TAKEN_BY_TORCH = {
    "_ZTIi": LIBCXX,
    "__cxa_allocate_exception": LIBCXX,
    "__cxa_throw": LIBCXX,
    "strlen": LIBSYSTEM,
}
GOOD = """
#define EXPORT extern "C" __attribute__((visibility("default")))
extern "C" int aoti_torch_get_dim();
EXPORT int rope_pool_version() {
  if (aoti_torch_get_dim() != 0) throw 1;
  return 0;
}
"""


@pytest.fixture(scope="module")
def libtorch(tmp_path_factory) -> Path:
    """A torch for macOS that has what NEW_TORCH names, and a function of C++."""
    folder = tmp_path_factory.mktemp("torch")
    functions = [f'extern "C" int {name}() {{ return 0; }}' for name in sorted(NEW_TORCH)]
    source, output = folder / "torch.cpp", folder / "libtorch_cpu.dylib"
    source.write_text("\n".join([*functions, "namespace at { int get() { return 0; } }"]))
    compile_source(source, folder / "torch.o", [])
    link([folder / "torch.o"], [], output)
    return output


def build(folder: Path, libtorch: Path, code: str = GOOD) -> Path:
    source, stub = folder / "library.cpp", folder / "libc++.tbd"
    source.write_text(code)
    write_libcxx_stub([name for name, library in TAKEN_BY_TORCH.items() if library == LIBCXX], stub)
    compile_source(source, folder / "library.o", ["-O1", "-fvisibility=hidden"])
    link([folder / "library.o"], [libtorch, stub], folder / NAME)
    return folder / NAME


def faults(library: Path) -> list[str]:
    return library_faults(library, MACOS, TAKEN_BY_TORCH, TORCHES)


def test_library_without_fault(tmp_path, libtorch):
    library = build(tmp_path, libtorch)
    assert faults(library) == []
    assert imported(read_macho(library))["__cxa_throw"] == LIBCXX


@pytest.mark.parametrize(
    "code, expected",
    [
        (
            'extern "C" int torch_mps_set_arg_bytes(); EXPORT int rope_pool_x() { return torch_mps_set_arg_bytes(); }',
            [
                "newer than the oldest torch: ['torch_mps_set_arg_bytes'], expected []",
                "missing in torch 2.10.0: ['torch_mps_set_arg_bytes'], expected []",
            ],
        ),
        (
            'extern "C" int torch_new_function(); EXPORT int rope_pool_x() { return torch_new_function(); }',
            ["missing in torch 2.10.0: ['torch_new_function'], expected []"],
        ),
        (
            "namespace at { int get(); } EXPORT int rope_pool_x() { return at::get(); }",
            [
                "outside torch's C shim: ['_ZN2at3getEv'], expected []",
                "missing in torch 2.10.0: ['_ZN2at3getEv'], expected []",
                "missing in torch 2.14.1: ['_ZN2at3getEv'], expected []",
            ],
        ),
        (
            'extern "C" void __cxa_throw(void*, void*, void (*)(void*)) { __builtin_trap(); }',
            [
                f"__cxa_throw from: None, expected {LIBCXX}",
                "own C++ runtime: ['__cxa_throw'], expected []",
            ],
        ),
        (
            'extern "C" int rand(); EXPORT int rope_pool_x() { return rand(); }',
            ["taken from the system, but not by torch: ['rand'], expected []"],
        ),
        (
            "EXPORT int other() { return 0; }",
            ["exports beside rope_pool_*: ['other'], expected []"],
        ),
        (
            f'EXPORT const char* rope_pool_x() {{ return "{ROOT.resolve()}/x.cpp"; }}',
            ["names the build machine's folder: True, expected False"],
        ),
    ],
)
def test_fault_of_the_code(tmp_path, libtorch, code, expected):
    assert faults(build(tmp_path, libtorch, GOOD + code)) == expected


def test_libraries_of_another_name(tmp_path, libtorch):
    elsewhere = tmp_path / "libelsewhere.dylib"
    link([libtorch.with_name("torch.o")], [], elsewhere)
    found = faults(build(tmp_path, elsewhere))
    assert found[0].startswith(
        "loads: ['/usr/lib/libSystem.B.dylib', '/usr/lib/libc++.1.dylib', '@rpath/libelse"
    )
    assert "takes anything from torch: False, expected True" in found


@pytest.mark.parametrize(
    "target, expected",
    [
        (TARGET.replace("aarch64", "x86_64"), "architecture: X86_64, expected ARM64"),
        (TARGET.replace("14.0", "15.1"), "oldest macOS: (15, 1), expected (14, 0)"),
        (TARGET, "file type: OBJECT, expected DYLIB"),
    ],
)
def test_another_kind_of_file(tmp_path, target, expected):
    (tmp_path / "library.cpp").write_text(GOOD)
    compile_source(tmp_path / "library.cpp", tmp_path / "library.o", [], target)  # to link it takes zig long
    assert expected in faults(tmp_path / "library.o")


def test_unsigned(tmp_path, libtorch):
    library = build(tmp_path, libtorch)
    binary = read_macho(library)
    binary.remove_signature()
    binary.write(str(library))
    assert "signed: False, expected True" in faults(library)


def test_no_macho_file(tmp_path):
    (tmp_path / NAME).write_bytes(b"\x7fELF and more")
    assert faults(tmp_path / NAME) == ["it is no Mach-O file of one architecture"]


# ---- The wheel


def write_wheel(folder: Path, tag: str, names: set[str]) -> Path:
    wheel = folder / f"torch_ropepool-1.0-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        for name in names:
            files.writestr(name, "")
        files.writestr("torch_ropepool-1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
    return wheel


NAMES = {LIBRARY} | {str(path.relative_to(ROOT)) for path in (ROOT / "torch_ropepool").rglob("*.py")}
TAG = "py3-none-macosx_14_0_arm64"


def test_wheel_without_fault(tmp_path):
    assert wheel_faults(write_wheel(tmp_path, TAG, NAMES), MACOS) == []


def test_wheel_with_faults(tmp_path):
    names = NAMES - {LIBRARY, "torch_ropepool/ops.py"} | {"torch_ropepool/librope_pool.so"}
    wheel = write_wheel(tmp_path, "cp311-cp311-linux_x86_64", names)
    assert wheel_faults(wheel, MACOS) == [
        f"tag: {wheel.name} with ['cp311-cp311-linux_x86_64'], expected {TAG}",
        f"not in the wheel: {LIBRARY}",
        "not in the wheel: torch_ropepool/ops.py",
        "does not belong in the wheel: torch_ropepool/librope_pool.so",
    ]
