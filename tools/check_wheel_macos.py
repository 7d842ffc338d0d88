"""What can be said of a macOS wheel without a Mac: what it holds, and what its library takes from where."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

import lief
from build_config import ROOT

lief.logging.disable()  # it warns of tables that are empty

LIBRARY = "torch_ropepool/librope_pool.dylib"
TORCH = "@rpath/libtorch_cpu.dylib"
LIBCXX = "/usr/lib/libc++.1.dylib"
LIBSYSTEM = "/usr/lib/libSystem.B.dylib"
# Newer than the oldest torch: looked up by dlsym.
NOT_LINKED = re.compile(r"torch_mps_set_arg_bytes|torch_exception_get_what\w*")
C_SHIM = re.compile(r"(aoti_torch|torch)_\w+")
ADDED_BY_LINKER = {"__dso_handle", "_mh_dylib_header", "dyld_stub_binder"}
WEAK_REFERENCE = 0x40  # N_WEAK_REF of <mach-o/nlist.h>


def read_macho(path: Path) -> lief.MachO.Binary | None:
    """None if it is no Mach-O file of one architecture."""
    config = lief.MachO.ParserConfig()
    config.parse_dyld_bindings = config.parse_dyld_rebases = False
    binaries = lief.MachO.parse(str(path), config) if lief.is_macho(str(path)) else None
    return binaries.at(0) if binaries is not None and binaries.size == 1 else None


def c_name(symbol: lief.MachO.Symbol) -> str:
    return str(symbol.name).removeprefix("_")


def loaded(binary: lief.MachO.Binary) -> list[str]:
    """The libraries that are loaded with it."""
    own_name = lief.MachO.LoadCommand.TYPE.ID_DYLIB
    return [str(library.name) for library in binary.libraries if library.command != own_name]


def imported(binary: lief.MachO.Binary) -> dict[str, str]:
    """From each symbol that must be there at load time to the library that must have it."""
    by_ordinal = dict(enumerate(loaded(binary), start=1))
    return {
        c_name(symbol): by_ordinal.get(symbol.library_ordinal, "no library")
        for symbol in binary.symbols
        if symbol.category == lief.MachO.Symbol.CATEGORY.UNDEFINED and not symbol.description & WEAK_REFERENCE
    }


def exported(binary: lief.MachO.Binary) -> set[str]:
    return {c_name(symbol) for symbol in binary.exported_symbols}


def defined(binary: lief.MachO.Binary) -> set[str]:
    """Hidden ones too."""
    undefined = lief.MachO.Symbol.CATEGORY.UNDEFINED
    names = {c_name(symbol) for symbol in binary.symbols if symbol.category != undefined}
    return {name for name in names if not name.endswith("__thunk")}  # zig's jumps to what is imported


def library_faults(
    path: Path,
    macos: tuple[int, int],
    taken_by_torch: Mapping[str, str],
    torches: Mapping[str, set[str]],
) -> list[str]:
    """What is wrong with a library that is to run from a version of macOS on.

    `taken_by_torch`: what a libtorch_cpu for that macOS imports. `torches`: from each version of torch
    to what its libtorch_cpu exports.
    """
    binary = read_macho(path)
    if binary is None:
        return ["it is no Mach-O file of one architecture"]
    header, made_for = binary.header, binary.build_version
    imports, exports = imported(binary), exported(binary) - ADDED_BY_LINKER
    of_system = {name for name, library in imports.items() if library in (LIBCXX, LIBSYSTEM)}
    c_shim = {name for name, library in imports.items() if library == TORCH}
    faults = []

    def expect(what: str, found: object, expected: object) -> None:
        if found != expected:
            faults.append(f"{what}: {found}, expected {expected}")

    expect("architecture", header.cpu_type.name, "ARM64")
    expect("file type", header.file_type.name, "DYLIB")
    expect("oldest macOS", tuple(made_for.minos[:2]) if made_for is not None else None, macos)
    expect("signed", binary.has_code_signature, True)  # Apple silicon loads nothing that is not
    expect("loads", sorted(loaded(binary)), sorted([TORCH, LIBCXX, LIBSYSTEM]))
    expect("search paths of its own", [rpath.path for rpath in binary.rpaths], [])

    # An exception of a C++ runtime of its own would be a stranger to torch.
    expect("__cxa_throw from", imports.get("__cxa_throw"), LIBCXX)
    expect("own C++ runtime", sorted(n for n in defined(binary) if n.startswith("__cxa_")), [])
    # What torch takes is there. Of anything else that could not be said without a Mac.
    unknown = {name for name in of_system if taken_by_torch.get(name) != imports[name]} - ADDED_BY_LINKER
    expect("taken from the system, but not by torch", sorted(unknown), [])
    expect("bound to no library", sorted(n for n, lib in imports.items() if lib == "no library"), [])

    expect("takes anything from torch", bool(c_shim), True)
    expect("outside torch's C shim", sorted(n for n in c_shim if not C_SHIM.fullmatch(n)), [])
    expect("newer than the oldest torch", sorted(n for n in c_shim if NOT_LINKED.fullmatch(n)), [])
    for version, has in torches.items():
        expect(f"missing in torch {version}", sorted(c_shim - has), [])
    expect("names the build machine's folder", bytes(ROOT.resolve()) in path.read_bytes(), False)
    expect("exports beside rope_pool_*", sorted(n for n in exports if not n.startswith("rope_pool_")), [])
    expect("exports anything", bool(exports), True)
    return faults


def wheel_faults(wheel: Path, macos: tuple[int, int]) -> list[str]:
    """Of its name and of the list of its files."""
    faults = []
    tag = f"py3-none-macosx_{macos[0]}_{macos[1]}_arm64"
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        metadata = next(name for name in names if name.endswith(".dist-info/WHEEL"))
        tags = re.findall(r"^Tag: (.+)$", files.read(metadata).decode(), re.MULTILINE)
    if not wheel.stem.endswith(f"-{tag}") or tags != [tag]:
        faults.append(f"tag: {wheel.name} with {tags}, expected {tag}")
    expected = {LIBRARY} | {str(path.relative_to(ROOT)) for path in (ROOT / "torch_ropepool").rglob("*.py")}
    found = {name for name in names if ".dist-info/" not in name}
    faults += [f"not in the wheel: {name}" for name in sorted(expected - found)]
    faults += [f"does not belong in the wheel: {name}" for name in sorted(found - expected)]
    return faults
