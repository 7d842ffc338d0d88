"""What clang accepts and Metal does not: each refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .errors import CompileError
from .translate import ENTRIES, INCLUDE_PRAGMA, Token, significant

# Metal Shading Language Specification, 'Restrictions' and 'Scalar Data Types'.
WORDS = {
    "double": "Metal has no double",
    "new": "Metal has no new",
    "delete": "Metal has no delete",
    "throw": "Metal has no exceptions",
    "try": "Metal has no exceptions",
    "catch": "Metal has no exceptions",
    "virtual": "Metal has no virtual functions",
    "typeid": "Metal has no run-time type information",
    "dynamic_cast": "Metal has no run-time type information",
    "noexcept": "Metal has no noexcept",
    "goto": "Metal has no goto",
    "register": "Metal has no register variables",
    "thread_local": "Metal has no thread_local",
    "asm": "Metal has no inline assembly",
    "std": "Metal has no C++ standard library",
    "main": "a Metal function may not be named main",
    "__int128": "Metal has no 128-bit integers",
    "__attribute__": "Metal's attributes are written [[...]]",
    "address_space": "Metal's address spaces have names",
}
SPACES = r"\b(?:device|constant|threadgroup|thread)\b"

METAL_HEADER = re.compile(r"<metal_\w+>|<simd/simd\.h>")
PRAGMA = re.compile(r"#[ \t]*pragma[ \t]+(\S+)[ \t]*(.*?)[ \t]*$")
METAL_PRAGMA = re.compile(r"fp (math_mode|contract) ?\( ?(\w+) ?\)")
PRAGMA_VALUES = {"math_mode": ("safe", "relaxed", "fast"), "contract": ("off", "on", "fast")}


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def check_source(source: str) -> None:
    """The text as torch gets it."""
    for offset, character in enumerate(source):
        if not 0 < ord(character) < 128:
            raise CompileError(
                f"line {line_of(source, offset)}: {character!r} is not ASCII, and torch reads a shader as ASCII"
            )


def pragma_of(t: Token) -> tuple[str, str] | None:
    """`#pragma NAME rest`."""
    m = PRAGMA.match(t.text) if t.kind == "line" else None
    return (m[1], m[2]) if m else None


def check_pragma(t: Token, name: str, rest: str) -> None:
    if name == INCLUDE_PRAGMA:
        header = rest.split("//")[0].strip()
        if not METAL_HEADER.fullmatch(header):
            raise CompileError(
                f"line {t.line}: #include {header}: "
                "a shader made from a string can include Metal's own headers only"
            )
    if name == "METAL":
        m = METAL_PRAGMA.fullmatch(rest)
        if not m or m[2] not in PRAGMA_VALUES[m[1]]:
            raise CompileError(f"line {t.line}: #pragma METAL {rest} is none of Metal's")


def check_tokens(tokens: list[Token]) -> None:
    """After the preprocessor, so what macros hide is seen and what `#if` drops is not."""
    for t in tokens:
        if pragma := pragma_of(t):
            check_pragma(t, *pragma)
    words = significant(tokens)
    for i, t in enumerate(words):
        if t.kind == "number":
            check_number(t)
        if t.kind != "word":
            continue
        if t.text in WORDS:
            raise CompileError(f"line {t.line}: {WORDS[t.text]}")
        if t.text == "long":
            rest = (w.text for w in words[i + 1 :] if w.text not in ("unsigned", "signed", "int", "const"))
            if (following := next(rest, "")) in ("long", "double"):
                raise CompileError(f"line {t.line}: Metal has no long {following}")
        if t.text in ("struct", "class") and words[i - 1].text != "enum":
            head = []
            for w in words[i + 1 :]:
                if w.text in "{;(":
                    break
                head.append(w.text)
            if ":" in head:
                raise CompileError(f"line {t.line}: Metal has no derived classes")


def check_number(t: Token) -> None:
    text = t.text.lower().replace("'", "")
    hexadecimal = text.startswith("0x")
    if not hexadecimal and ("." in text or "e" in text):
        if text.endswith("l"):
            raise CompileError(f"line {t.line}: {t.text}: Metal has no long double")
    elif text.endswith(("ll", "llu")):
        raise CompileError(f"line {t.line}: {t.text}: Metal has no long long, so no such suffix")


DECLARATIONS = {"ParmVarDecl", "VarDecl", "FieldDecl", "FunctionDecl", "CXXMethodDecl"}
FUNCTION_POINTER = re.compile(r"\([^()]*[*&]+\)\(")


class SyntaxCheck:
    """Walks clang's dump of the shader's own declarations."""

    def __init__(self, text: str, file: str, metal_version: int):
        self.text = text
        self.end = text.index(ENTRIES)  # what follows is the translator's
        self.metal_version = metal_version
        self.file = file
        self.current = ""

    def check(self, tree: dict[str, Any]) -> None:
        for node, parent in self.nodes(tree):
            self.check_node(node, parent)

    def nodes(self, tree: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
        """Those of the shader's text, each with its parent's kind."""
        # clang writes a location's file only where it changes.
        stack = [(tree, "")]
        while stack:
            node, parent = stack.pop()
            ends = node.get("range", {})
            self.note_file(node.get("loc") or ends.get("begin", {}))
            inside = self.current == self.file
            for end in ends.values():
                self.note_file(end)
            if inside and not node.get("isImplicit"):
                yield node, parent
            stack.extend((child, node.get("kind", "")) for child in reversed(node.get("inner", [])))

    def note_file(self, location: dict[str, Any]) -> None:
        for place in (location.get("spellingLoc"), location.get("expansionLoc"), location):
            if place and "file" in place:
                self.current = place["file"]

    @staticmethod
    def offset(location: dict[str, Any]) -> int | None:
        return location.get("expansionLoc", location).get("offset")

    def line(self, offset: int) -> int:
        before = self.text[:offset]
        marker = re.search(r'(?s).*^# (\d+) "[^\n]*\n', before, re.MULTILINE)
        if not marker:
            return line_of(self.text, offset)
        return int(marker.group(1)) + before.count("\n", marker.end())

    def check_node(self, node: dict[str, Any], parent: str) -> None:
        kind = node.get("kind", "")
        begin = self.offset(node.get("range", {}).get("begin", {}))
        if begin is None or begin >= self.end:
            return
        if kind == "LambdaExpr" and self.metal_version < 320:
            raise CompileError(f"line {self.line(begin)}: Metal has no lambdas before 3.2")
        if kind in DECLARATIONS or kind in ("TypedefDecl", "TypeAliasDecl"):
            qualified = node.get("type", {}).get("qualType", "")
            if kind not in ("FunctionDecl", "CXXMethodDecl") and FUNCTION_POINTER.search(qualified):
                raise CompileError(f"line {self.line(begin)}: Metal has no function pointers: {qualified}")
        if kind in DECLARATIONS and (name := self.offset(node.get("loc", {}))) is not None:
            start = max(self.text.rfind(c, 0, begin) for c in ";{}(),\n") + 1
            self.check_pointer(self.text[start:name], begin, node.get("name", ""))
            at_namespace_scope = kind == "VarDecl" and parent in ("TranslationUnitDecl", "NamespaceDecl")
            if at_namespace_scope and not re.search(r"\bconstant\b", self.text[start:name]):
                raise CompileError(
                    f"line {self.line(begin)}: {node['name']}: a variable at namespace scope must be constant"
                )
        if kind == "CStyleCastExpr" and self.text[begin : begin + 1] == "(":
            self.check_pointer(self.text[begin : self.text.find(")", begin)], begin, "a cast")

    def check_pointer(self, declaration: str, offset: int, name: str) -> None:
        declaration = re.sub(r"\boperator\b.*", "", declaration)
        if re.search(r"[*&]", declaration) and not re.search(SPACES, declaration):
            raise CompileError(
                f"line {self.line(offset)}: {name}: a pointer or reference needs an address space "
                "(device, constant, threadgroup or thread)"
            )
