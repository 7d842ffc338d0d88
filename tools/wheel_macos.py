"""Builds the macOS arm64 wheel on Linux, with zig, and checks it. What is downloaded stays in build/macos."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import build_config
import lief
from check_wheel_macos import (
    LIBCXX,
    LIBRARY,
    exported,
    imported,
    library_faults,
    read_macho,
    wheel_faults,
)
from embed_shader import write_header
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

MACOS = (14, 0)  # what the wheel of TORCH needs
TORCH = "2.13.0"
ALSO_RUNS_ON = ("2.10.0", "2.14.1")
BUILD = build_config.ROOT / "build/macos"
PLATFORM = f"macosx_{MACOS[0]}_{MACOS[1]}_arm64"
TARGET = f"aarch64-macos.{MACOS[0]}.{MACOS[1]}"


def zig(*command: str) -> None:
    subprocess.run([sys.executable, "-m", "ziglang", *command], check=True, cwd=build_config.ROOT)


def compile_source(source: Path, output: Path, flags: Iterable[str], target: str = TARGET) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    # Not the sized operator delete, which Apple's compiler leaves out for these systems.
    own_flags = ["-fPIC", "-g0", "-fno-sized-deallocation"]
    zig("c++", "-target", target, "-c", *flags, *own_flags, str(source), "-o", str(output))


def link(objects: Sequence[Path], libraries: Sequence[Path], output: Path) -> None:
    """By the C compiler, which adds no C++ runtime: the system's is one of the libraries."""
    output.parent.mkdir(parents=True, exist_ok=True)
    name = f"-Wl,-install_name,@rpath/{output.name}"
    zig("cc", "-target", TARGET, "-shared", name, *map(str, [*objects, *libraries]), "-o", str(output))


def write_libcxx_stub(symbols: Iterable[str], output: Path) -> None:
    """A text stub of the system's C++ library that has these symbols and no others."""
    names = ", ".join(f"'_{symbol}'" for symbol in sorted(symbols))
    output.write_text(f"""\
--- !tapi-tbd
tbd-version: 4
targets: [ arm64-macos ]
install-name: '{LIBCXX}'
exports:
  - targets: [ arm64-macos ]
    symbols: [ {names} ]
...
""")


def torch_for_macos(version: str) -> Path:
    """The folder of torch out of its macOS wheel: its headers and libraries."""
    folder = BUILD / f"torch-{version}"
    if not folder.exists():
        wheels = BUILD / "wheels"
        options = [
            f"--platform={PLATFORM}",
            "--python-version=3.11",
            "--only-binary=:all:",
            "--no-deps",
            "-q",
        ]
        command = [sys.executable, "-m", "pip", "download", *options, "-d", str(wheels), f"torch=={version}"]
        subprocess.run(command, check=True)
        (wheel,) = wheels.glob(f"torch-{version}-*.whl")
        unpacked = folder.with_suffix(".part")
        with zipfile.ZipFile(wheel) as files:
            wanted = ("torch/include/", "torch/lib/libtorch_cpu.dylib")
            files.extractall(unpacked, [name for name in files.namelist() if name.startswith(wanted)])
        wheel.unlink()
        unpacked.rename(folder)
    return folder / "torch"


@cache
def libtorch(version: str) -> lief.MachO.Binary:
    binary = read_macho(torch_for_macos(version) / "lib/libtorch_cpu.dylib")
    assert binary is not None
    return binary


class CrossBuild(build_ext):
    """build_ext with zig as its compiler and the macOS torch as torch."""

    def get_ext_filename(self, ext_name: str) -> str:
        return build_config.library_filename(ext_name, "darwin")

    def build_extension(self, ext: Extension) -> None:
        torch = torch_for_macos(TORCH)
        write_header(build_config.ROOT / build_config.SHADER_HEADER)
        includes = [torch / "include", torch / "include/torch/csrc/api/include"]
        flags = [*ext.extra_compile_args, f"-I{build_config.SHADER_HEADER.parent}"]
        flags += [f"-D{name}={value}" for name, value in ext.define_macros]
        flags += [flag for path in includes for flag in ("-isystem", str(path))]
        objects = [BUILD / "objects" / f"{Path(source).stem}.o" for source in ext.sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(partial(compile_source, flags=flags), map(Path, ext.sources), objects))
        # What torch, made for the same macOS, takes from the system's C++ library is there to be taken.
        # Anything else does not link.
        stub = BUILD / "libc++.tbd"
        taken = imported(libtorch(TORCH)).items()
        write_libcxx_stub((name for name, library in taken if library == LIBCXX), stub)
        link(objects, [torch / "lib/libtorch_cpu.dylib", stub], Path(self.get_ext_fullpath(ext.name)))


def build_wheel(output: Path) -> Path:
    """What pip would build on a Mac."""
    os.chdir(build_config.ROOT)
    shutil.rmtree(BUILD / "wheel", ignore_errors=True)  # no file of an earlier build in the wheel
    library = Extension(
        build_config.LIBRARY,
        [str(source) for source in build_config.sources("darwin")],
        define_macros=list(build_config.MACROS.items()),
        extra_compile_args=build_config.compile_args(),
    )
    setup(
        ext_modules=[library],
        cmdclass={"build_ext": CrossBuild, "bdist_wheel": build_config.PlatformWheel},
        script_args=[
            *("-q", "build", f"--build-base={BUILD / 'wheel'}"),
            *("bdist_wheel", f"--plat-name={PLATFORM}", f"--dist-dir={output}"),
        ],
    )
    (wheel,) = output.glob(f"*-{build_config.VERSION}-*macosx*.whl")
    return wheel


def main() -> None:
    wheel = build_wheel(build_config.ROOT / "dist")
    with zipfile.ZipFile(wheel) as files:
        library = Path(files.extract(LIBRARY, BUILD / "checked"))
    torches = {version: exported(libtorch(version)) for version in (TORCH, *ALSO_RUNS_ON)}
    faults = wheel_faults(wheel, MACOS)
    faults += library_faults(library, MACOS, imported(libtorch(TORCH)), torches)
    if faults:
        sys.exit("\n".join([f"{wheel.name}:", *faults]))
    print(f"{wheel.relative_to(build_config.ROOT)}: every check passed, against torch {', '.join(torches)}")


if __name__ == "__main__":
    main()
