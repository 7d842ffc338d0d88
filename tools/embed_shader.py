"""Makes one C++ header of the shader: torch's shader compiler opens no files, so includes are pasted in."""

from __future__ import annotations

import re
import sys
from pathlib import Path

SHADER = Path(__file__).parent.parent / "torch_ropepool/metal/rope_pool.metal"


def shader_source(path: Path = SHADER, seen: set[Path] | None = None) -> str:
    """The text of a file with every quoted include replaced by that file's text, once."""
    seen = set() if seen is None else seen
    if path.resolve() in seen:
        return ""
    seen.add(path.resolve())
    lines = []
    for line in path.read_text(encoding="ascii").splitlines():  # torch reads the text as ASCII
        include = re.fullmatch(r'#include "(.+)"', line)
        if include:
            lines.append(shader_source(path.parent / include[1], seen))
        elif line != "#pragma once":
            lines.append(line)
    return "\n".join(lines)


def write_header(output: Path) -> None:
    """Writes a header that defines `kShaderSource`. Untouched where it is up to date."""
    text = f'constexpr char kShaderSource[] = R"METAL({shader_source()}\n)METAL";\n'
    if not output.exists() or output.read_text() != text:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)


if __name__ == "__main__":
    write_header(Path(sys.argv[1]))
