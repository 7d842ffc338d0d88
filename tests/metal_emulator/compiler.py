"""From a shader's text to a shared library that the runtime can run; and the C++ builds around it.

Everything built lies in the repository's `build/`, under the hash of what it was made of.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import torch

from .errors import CompileError
from .instrument import Instrumenter, demangle
from .refusals import SyntaxCheck, check_source, check_tokens
from .translate import INCLUDE_PRAGMA, Kernel, Translator, as_clang_reads, tokenize

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "metal_emulator"
TORCH = Path(torch.__file__).parent
CXX = os.environ.get("CXX", "c++")


@cache
def clang() -> tuple[str, ...]:
    try:
        import ziglang
    except ImportError:
        raise RuntimeError("the Metal emulator compiles shaders with clang: pip install ziglang") from None
    return (str(Path(ziglang.__file__).parent / "zig"), "clang")


@cache
def machine_flags() -> tuple[str, ...]:
    """A fused multiply-add as one instruction, as a GPU has it: contraction can then be seen."""
    if platform.machine() != "x86_64":
        return ()
    return tuple(
        f"-m{feature}" for feature in ("fma", "f16c") if feature in Path("/proc/cpuinfo").read_text()
    )


def sources_hash(paths: Iterable[Path], *extra: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode() + path.read_bytes())
    for text in (torch.__version__, *extra):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:20]


def run(command: Sequence[str], text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(done.stderr or f"{command[0]} failed")
    return done.stdout


def into_place(made: Path, at: Path) -> Path:
    """Two processes may build the same thing: each finishes its own, and the last one stays."""
    made.rename(at)
    return at


# ---- Shaders


class Compiler:
    def __init__(self, metal_version: int = 320, fast_math: bool = False):
        self.metal_version = metal_version
        self.fast_math = fast_math

    def compile(self, source: str, runtime: Path) -> Path:
        check_source(source)
        own = [*HERE.glob("*.py"), *(HERE / "shader").iterdir()]
        key = sources_hash(own, source, str(self.metal_version), str(self.fast_math), runtime.name)
        library = BUILD / "shaders" / f"{key}.so"
        if not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            self.build(source, library, runtime)
        return library

    def build(self, source: str, library: Path, runtime: Path) -> None:
        stem = library.with_suffix(f".{os.getpid()}")
        text, _ = self.translate(source)
        translated = stem.with_suffix(f"{stem.suffix}.cpp")
        translated.write_text(text)
        try:
            try:
                self.check_syntax(text, translated)
            except CompileError as e:
                raise CompileError(f"{e}{hint(str(e))}") from None
            instrumenter = Instrumenter(self.ir(translated))
            ir = instrumenter.instrument()
            names = [demangle(name) for name in instrumenter.functions]
            library.with_suffix(".functions.json").write_text(json.dumps(names))
            made = link(ir, stem, runtime)
        finally:
            translated.unlink()
        into_place(made, library)

    def translate(self, source: str) -> tuple[str, list[Kernel]]:
        text = self.preprocess(source)
        tokens = list(tokenize(text))
        check_tokens(tokens)
        text, kernels = Translator("".join(as_clang_reads(t) for t in tokens)).translate()
        include = re.compile(rf"^#pragma {INCLUDE_PRAGMA}.*", re.MULTILINE)
        return include.sub("", include.sub('#include "metal_stdlib.h"', text, count=1)), kernels

    def preprocess(self, source: str) -> str:
        include = re.compile(r"^[ \t]*#[ \t]*(?:include|import)\b", re.MULTILINE)
        source = include.sub(f"#pragma {INCLUDE_PRAGMA}", source)
        defines = {
            "__cplusplus": "201402L",
            "__METAL__": "1",
            "__METAL_MACOS__": "1",
            "__METAL_VERSION__": str(self.metal_version),
            "__HAVE_BFLOAT__": "1" if self.metal_version >= 310 else None,
        }
        flags = [f"-D{name}={value}" for name, value in defines.items() if value]
        flags += ["-Wno-builtin-macro-redefined", "-Werror=undef"]
        text = run([*clang(), "-E", "-undef", "-x", "c++", "-std=c++14", *flags, "-"], source)
        text = text[text.index('# 1 "<stdin>"') :] if '# 1 "<stdin>"' in text else text
        return text.replace('"<stdin>"', '"shader"')

    def flags(self) -> list[str]:
        return [
            "-x",
            "c++",
            "-std=c++14",
            "-isystem",
            str(HERE / "shader"),
            "-fPIC",
            "-fsigned-char",
            "-fno-exceptions",
            "-fno-rtti",
            # Metal may contract unless the shader says that it must not.
            "-ffp-contract=fast-honor-pragmas",
            "-Xclang",
            "-ffloat16-excess-precision=none",
            "-Xclang",
            "-fbfloat16-excess-precision=none",
            *(["-ffast-math"] if self.fast_math else []),
            *machine_flags(),
            "-Wno-everything",
            "-Werror=c++17-extensions",
            "-Werror=c++20-extensions",
            "-Werror=return-type",
            "-ferror-limit=5",
            "-fno-caret-diagnostics",
        ]

    def check_syntax(self, text: str, path: Path) -> None:
        tree = run([*clang(), *self.flags(), "-fsyntax-only", "-Xclang", "-ast-dump=json", str(path)])
        SyntaxCheck(text, str(path), self.metal_version).check(json.loads(tree))

    def ir(self, path: Path) -> str:
        undefined = "shift,bounds,integer-divide-by-zero,signed-integer-overflow,float-cast-overflow,return,unreachable"
        return run(
            [
                *clang(),
                *self.flags(),
                "-O1",
                "-Xclang",
                "-disable-llvm-passes",
                "-gline-tables-only",
                "-ftrivial-auto-var-init=pattern",
                f"-fsanitize={undefined}",
                "-fsanitize-minimal-runtime",
                "-fsanitize-recover=all",
                "-S",
                "-emit-llvm",
                str(path),
                "-o",
                "-",
            ]
        )


def hint(error: str) -> str:
    """What Metal can do and the emulator cannot."""
    if "reference in address space" in error or "object is in address space" in error:
        return "The emulator copies no whole struct to or from device or constant memory: copy its fields."
    if "function type may not be qualified with an address space" in error:
        return "The emulator has no member functions of objects in device or constant memory."
    return ""


def link(ir: str, stem: Path, runtime: Path) -> Path:
    object_ = stem.with_suffix(f"{stem.suffix}.o")
    made = stem.with_suffix(f"{stem.suffix}.so")
    run(
        [
            *clang(),
            "-x",
            "ir",
            "-O1",
            "-fPIC",
            *machine_flags(),
            "-Wno-everything",
            "-c",
            "-",
            "-o",
            str(object_),
        ],
        ir,
    )
    try:
        run([CXX, "-shared", str(object_), str(runtime), "-lm", "-Wl,-z,defs", "-o", str(made)])
    finally:
        object_.unlink()
    return made


# ---- The runtime, and host code


def build_library(
    name: str,
    sources: Sequence[Path],
    *,
    depends: Iterable[Path] = (),
    flags: Sequence[str] = (),
    link_with: Sequence[Path] = (),
) -> Path:
    """Compiled with the system's C++ compiler against torch; what is in `link_with` comes before torch."""
    flags = ["-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", *flags]
    own = [*sources, *depends]
    key = sources_hash(own, CXX, *flags, *(path.name for path in link_with))
    library = BUILD / f"lib{name}-{key}.so"
    if library.exists():
        return library
    BUILD.mkdir(parents=True, exist_ok=True)
    made = library.with_suffix(f".{os.getpid()}.so")
    run(
        [
            *(CXX, *flags, "-isystem", str(TORCH / "include"), "-shared", *map(str, sources)),
            *("-Wl,--no-as-needed", *map(str, link_with)),
            *(f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10", "-ldl"),
            *(f"-Wl,-rpath,{TORCH / 'lib'}:{BUILD}", f"-Wl,-soname,{library.name}", "-o", str(made)),
        ]
    )
    return into_place(made, library)


def build_runtime() -> Path:
    headers = [*(HERE / "runtime").glob("*.h"), HERE / "shader/abi.h"]
    sources = [HERE / "runtime/engine.cpp", HERE / "runtime/shim.cpp"]
    return build_library("aoti_torch_mps", sources, depends=headers)


def build_set_arg_bytes(runtime: Path) -> Path:
    return build_library("torch_mps_2_14", [HERE / "runtime/shim_2_14.cpp"], link_with=[runtime])


if __name__ == "__main__":  # a shader from stdin, as the C++ that clang is given
    sys.stdout.write(Compiler().translate(sys.stdin.read())[0])
