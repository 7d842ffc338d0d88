"""LLVM IR in which every access to device, constant and threadgroup memory goes through the runtime.

Done before any optimisation, so that what is counted and checked is what the shader says.
"""

from __future__ import annotations

import ctypes
import re

from .errors import CompileError

VALUE = r'(?:[%@](?:[\w.$-]+|"[^"]*")|[\w ]+ \(.*\)|null|poison|undef)'
LOAD = re.compile(
    rf"^\s*(?P<to>%\S+) = load (?P<how>(?:atomic )?(?:volatile )?)(?P<type>.+?), "
    rf"ptr addrspace\((?P<space>[123])\) (?P<at>{VALUE})(?P<order> monotonic| seq_cst)?, align (?P<align>\d+)(?P<rest>.*)$"
)
STORE = re.compile(
    rf"^\s*store (?P<how>(?:atomic )?(?:volatile )?)(?P<what>.+), "
    rf"ptr addrspace\((?P<space>[123])\) (?P<at>{VALUE})(?P<order> monotonic| seq_cst)?, align (?P<align>\d+)(?P<rest>.*)$"
)
UPDATE = re.compile(
    rf"^\s*(?P<to>%\S+) = atomicrmw (?P<how>(?:volatile )?)(?P<operation>\w+) "
    rf"ptr addrspace\((?P<space>[123])\) (?P<at>{VALUE}), (?P<type>\w+) (?P<value>\S+) (?P<order>\w+), align (?P<align>\d+)(?P<rest>.*)$"
)
# Whatever else reaches the memory that is watched.
UNCHECKED = re.compile(
    rf"^\s*(?:%\S+ = )?(?:load|store|atomicrmw|cmpxchg)\b.*, ptr addrspace\([123]\) {VALUE}(?: \w+)*, align"
    r"|^\s*(?:%\S+ = )?(?:atomicrmw|cmpxchg)\b.*ptr addrspace\([123]\)"
)
DEFINE = re.compile(r'^define .*?@(?P<name>[\w.$]+|"[^"]*")\(.*\{$')
GLOBAL = re.compile(
    r'^(?P<head>@(?P<name>[\w.$]+|"[^"]*") = .*?addrspace\((?P<space>[23])\) (?:constant|global) )'
    r"(?P<rest>.*?)(?P<tail>(?:, comdat(?:\([^)]*\))?)?, align \d+.*)$"
)
GUARD = "[256 x i8]"  # after each global, so that what lies beyond it is no other one
LOCATION = re.compile(r"^(!\d+) = .*!DILocation\(line: (\d+)")
CALL = re.compile(r'\bcall .*?@(?P<name>[\w.$]+|"[^"]*")\(')
INDIRECT = re.compile(r"\bcall [^@(]*?%[\w.]+\(")
TYPE = re.compile(r"<.+?>|\[.+\]|\{.+\}|%\S+|[\w]+(?: addrspace\(\d\))?")

DECLARATIONS = """
declare ptr @metal_emulator_access(i64, i64, i64, i32, i32)
declare void @metal_emulator_undefined(i32, i32)
@metal_emulator_calls = global [{count} x i64] [ {counts} ]
"""
UNDEFINED = re.compile(r"^\s*call void @__ubsan_handle_(\w+)_minimal\(")
UNDEFINED_KINDS = (
    "out_of_bounds",
    "shift_out_of_bounds",
    "divrem_overflow",
    "add_overflow",
    "sub_overflow",
    "mul_overflow",
    "negate_overflow",
    "float_cast_overflow",
    "missing_return",
    "builtin_unreachable",
)
READ, WRITE, ATOMIC_READ, ATOMIC_WRITE, ATOMIC_UPDATE = range(5)


def size_of(llvm_type: str) -> str:
    return f"ptrtoint (ptr getelementptr ({llvm_type}, ptr null, i64 1) to i64)"


def first_type(text: str) -> str:
    """The type at the start of `[4 x i32] zeroinitializer` and the like."""
    if text[0] in "[{<":
        depth = 0
        for i, c in enumerate(text):
            depth += (c in "[{<") - (c in "]}>")
            if depth == 0:
                return text[: i + 1]
    return text.split(" ")[0].rstrip(",")


def demangle(name: str) -> str:
    """The qualified name of a function, without its arguments."""
    library = ctypes.CDLL("libstdc++.so.6")
    library.__cxa_demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    known = re.sub("DF16[_b]", "Dh", name)  # libstdc++ does not know every compiler's half types
    at = library.__cxa_demangle(known.encode(), None, None, ctypes.byref(status))
    text = ctypes.string_at(at).decode() if at else name
    while (shorter := re.sub(r"<[^<>]*>|\([^()]*\)(?: const)?|\[abi:\w+\]", "", text)) != text:
        text = shorter
    return text.split(" ")[-1]


class Instrumenter:
    def __init__(self, ir: str):
        self.lines = ir.splitlines()
        self.source_line = {m.group(1): m.group(2) for line in self.lines if (m := LOCATION.match(line))}
        self.functions: list[str] = []  # mangled, in the order of their counters
        self.calls: dict[str, set[str]] = {}
        self.fresh = 0

    def instrument(self) -> str:
        out: list[str] = []
        globals_: list[tuple[str, str, str]] = []
        function = ""
        pending_count = False
        for line in self.lines:
            if m := GLOBAL.match(line):
                llvm_type = first_type(m["rest"])
                globals_.append((m["name"], llvm_type, m["space"]))
                guarded = f"{{ {llvm_type}, {GUARD} }} {{ {m['rest']}, {GUARD} zeroinitializer }}"
                out.append(f"{m['head']}{guarded}{m['tail']}")
                continue
            if m := DEFINE.match(line):
                function = m["name"].strip('"')
                out.append(line)
                self.calls[function] = set()
                pending_count = True
                continue
            if not function:
                out.append(line)
                continue
            if pending_count:
                pending_count = False
                if re.match(r"^[\w.]+:", line):
                    out.append(line)
                    out += self.count(function)
                    continue
                out += self.count(function)
            if line == "}":
                function = ""
                out.append(line)
                continue
            out += self.instruction(line, function)
        out += self.tables(globals_)
        self.refuse_recursion()
        return "\n".join(out) + "\n"

    def count(self, function: str) -> list[str]:
        counter = f"getelementptr (i64, ptr @metal_emulator_calls, i64 {len(self.functions)})"
        self.functions.append(function)
        return [
            f"  %emulator.count = load i64, ptr {counter}",
            "  %emulator.counted = add i64 %emulator.count, 1",
            f"  store i64 %emulator.counted, ptr {counter}",
        ]

    def line_of(self, line: str) -> str:
        m = re.search(r"!dbg (!\d+)", line)
        return self.source_line.get(m.group(1), "0") if m else "0"

    def access(self, m: re.Match[str], llvm_type: str, kind: int, line: str) -> tuple[list[str], str]:
        self.fresh += 1
        n = self.fresh
        # Plain memory is aligned to what the CPU wants; the alignment that Metal wants is checked.
        return [
            f"  %emulator.at.{n} = ptrtoint ptr addrspace({m['space']}) {m['at']} to i64",
            f"  %emulator.p.{n} = call ptr @metal_emulator_access(i64 %emulator.at.{n}, "
            f"i64 {size_of(llvm_type)}, i64 {m['align']}, i32 {kind}, i32 {self.line_of(line)})",
        ], f"%emulator.p.{n}"

    def instruction(self, line: str, function: str) -> list[str]:
        if m := LOAD.match(line):
            before, p = self.access(m, m["type"], ATOMIC_READ if m["order"] else READ, line)
            return [*before, f"  {m['to']} = load {m['type']}, ptr {p}, align 1"]
        if m := STORE.match(line):
            llvm_type = first_type(m["what"])
            if llvm_type == "ptr" and m["what"].startswith("ptr addrspace("):
                llvm_type = m["what"][: m["what"].index(")") + 1]
            before, p = self.access(m, llvm_type, ATOMIC_WRITE if m["order"] else WRITE, line)
            return [*before, f"  store {m['what']}, ptr {p}, align 1"]
        if m := UPDATE.match(line):
            before, p = self.access(m, m["type"], ATOMIC_UPDATE, line)
            operation = f"atomicrmw {m['operation']} ptr {p}, {m['type']} {m['value']} {m['order']}"
            return [*before, f"  {m['to']} = {operation}, align {m['align']}"]
        if m := UNDEFINED.match(line):
            kind = UNDEFINED_KINDS.index(m[1])
            return [f"  call void @metal_emulator_undefined(i32 {kind}, i32 {self.line_of(line)})"]
        where = f"line {self.line_of(line)}"
        if UNCHECKED.search(line):
            raise CompileError(f"{where}: the emulator cannot check this access: {line.strip()}")
        if "addrspacecast" in line:
            raise CompileError(f"{where}: a cast from one address space to another")
        if re.search(r"@llvm\.mem\w+\.[^(]*p[123]", line):
            raise CompileError(f"{where}: the emulator cannot check a copy of a whole array: {line.strip()}")
        if INDIRECT.search(line):
            raise CompileError(f"{where}: Metal has no function pointers")
        if m := CALL.search(line):
            self.calls[function].add(m["name"].strip('"'))
        return [line]

    def tables(self, globals_: list[tuple[str, str, str]]) -> list[str]:
        counts = ["i64 0"] * len(self.functions) + ["i64 -1"]
        out = [DECLARATIONS.format(count=len(counts), counts=", ".join(counts))]
        rows = []
        for i, (name, llvm_type, space) in enumerate(globals_):
            text = demangle(name.strip('"'))
            out.append(f'@metal_emulator_name_{i} = private constant [{len(text) + 1} x i8] c"{text}\\00"')
            rows.append(
                f"{{ ptr, i64, i64, i32 }} {{ ptr @metal_emulator_name_{i}, "
                f"i64 ptrtoint (ptr addrspace({space}) @{name} to i64), i64 {size_of(llvm_type)}, i32 {space} }}"
            )
        rows.append("{ ptr, i64, i64, i32 } zeroinitializer")
        out.append(
            f"@metal_emulator_globals = constant [{len(rows)} x {{ ptr, i64, i64, i32 }}] [ {', '.join(rows)} ]"
        )
        uses = any(
            "metal_emulator_barrier" in c or "metal_emulator_exchange" in c for c in self.calls.values()
        )
        out.append(f"@metal_emulator_has_barriers = constant i32 {int(uses)}")
        return out

    def refuse_recursion(self) -> None:
        done: set[str] = set()

        def visit(function: str, path: list[str]) -> None:
            if function in path:
                raise CompileError(f"Metal has no recursion: {demangle(function)} calls itself")
            if function in done:
                return
            for callee in self.calls.get(function, ()):
                visit(callee, [*path, function])
            done.add(function)

        for function in self.calls:
            visit(function, [])
