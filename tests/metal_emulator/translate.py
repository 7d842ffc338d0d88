"""Metal to C++: what clang cannot read of a shader is taken out, and the kernels' entries are added.

Works on preprocessed text, token by token, and keeps every line in its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .errors import CompileError

TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<line>(?m:^)\#[^\n]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<number>\.?[0-9](?:[eEpP][+-]|[0-9a-zA-Z_.'])*)
      | (?P<word>[A-Za-z_]\w*)
      | (?P<mark>\[\[|::|->|<<=|<<|&&|\|\||[-+*/%&|^=!<>]=|\+\+|--|.)
    """,
    re.VERBOSE,
)
MARKER = re.compile(r'# (\d+) "')

# Stands where a header was included, until clang gets the text: its macros come after translation.
INCLUDE_PRAGMA = "metal_emulator_include"
ENTRIES = '# 1 "entries"'

# What an attribute of a kernel's argument stands for.
POSITIONS = {
    "thread_position_in_grid": "position_in_grid",
    "threads_per_grid": "grid",
    "thread_position_in_threadgroup": "position_in_group",
    "threads_per_threadgroup": "group",
    "dispatch_threads_per_threadgroup": "full_group",
    "threadgroup_position_in_grid": "group_position",
    "threadgroups_per_grid": "groups",
    "thread_index_in_threadgroup": "index_in_group",
    "thread_index_in_simdgroup": "lane",
    "simdgroup_index_in_threadgroup": "simdgroup",
    "simdgroups_per_threadgroup": "simdgroups",
}


@dataclass
class Token:
    kind: str
    text: str
    line: int


@dataclass
class Parameter:
    name: str
    attribute: str
    index: int | None  # of a buffer

    def bound(self, number: int) -> str:
        parameter = f"ParameterOf<{number}, Function>"
        if self.attribute == "buffer":
            return f"Bind<{parameter}>::buffer(t->buffers[{self.index}])"
        if self.attribute == "threads_per_simdgroup":
            return f"position<{parameter}>(kSimdWidth)"
        return f"position<{parameter}>(t->{POSITIONS[self.attribute]})"


@dataclass
class Kernel:
    name: str
    function: str  # the C++ expression that names it
    line: int
    parameters: list[Parameter] = field(default_factory=list)
    max_threads: int = 0


def tokenize(text: str) -> Iterator[Token]:
    line = 1
    for match in TOKEN.finditer(text):
        kind = match.lastgroup or "mark"
        yield Token(kind, match.group(), line)
        if kind == "line" and (marker := MARKER.match(match.group())):
            line = int(marker.group(1)) - 1
        line += match.group().count("\n")


def significant(tokens: list[Token]) -> list[Token]:
    return [t for t in tokens if t.kind not in ("space", "line")]


def as_clang_reads(t: Token) -> str:
    """Literals and pragmas that Metal has and clang has not."""
    if t.kind == "number":
        return literal(t.text)
    if t.kind != "line":
        return t.text
    text = re.sub(r"^#\s*pragma METAL fp contract ?\( ?(\w+) ?\)", r"#pragma clang fp contract(\1)", t.text)
    return re.sub(
        r"^#\s*pragma METAL fp math_mode ?\( ?(\w+) ?\)",
        lambda m: f"#pragma float_control(precise, {'on' if m[1] == 'safe' else 'off'})",
        text,
    )


def literal(text: str) -> str:
    """Metal's floats need no suffix, and its half types have one."""
    m = re.fullmatch(r"(?P<number>[0-9.]+(?:e[-+]?[0-9]+)?)(?P<suffix>f|h|bf)?", text.lower())
    if text.lower().startswith("0x") or not m:
        return text
    number, suffix = m["number"], m["suffix"]
    is_float = "." in number or "e" in number
    if suffix in ("h", "bf"):
        return f"(({'half' if suffix == 'h' else 'bfloat'}){number}{'' if is_float else '.'}f)"
    return text + "f" if is_float and not suffix else text


def split_attributes(tokens: list[Token]) -> tuple[list[Token], dict[str, str]]:
    """The tokens without `[[...]]`, and what stood there: name to argument."""
    rest: list[Token] = []
    attributes: dict[str, str] = {}
    i = 0
    while i < len(tokens):
        if tokens[i].text != "[[":
            rest.append(tokens[i])
            i += 1
            continue
        end = i + 1
        depth = 2
        while depth:
            if end == len(tokens):
                raise CompileError(f"line {tokens[i].line}: an attribute that does not end")
            depth += {"[[": 2, "[": 1, "]": -1}.get(tokens[end].text, 0)
            end += 1
        inside = significant(tokens[i + 1 : end - 2])
        for part in split(inside, ","):
            words = "".join(t.text for t in part[2:-1] if t.kind != "string")
            words += "".join(t.text[1:-1] for t in part[2:-1] if t.kind == "string")
            attributes[part[0].text] = words
        # What is taken out leaves its line ends, so that lines stay where they are.
        rest.extend(Token("space", "\n", t.line) for t in tokens[i:end] if "\n" in t.text)
        i = end
    return rest, attributes


def split(tokens: list[Token], separator: str) -> list[list[Token]]:
    """At the separators outside any bracket."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for t in tokens:
        depth += {"(": 1, "[": 1, "{": 1, "<": 1, "[[": 2, ")": -1, "]": -1, "}": -1, ">": -1}.get(t.text, 0)
        if t.text == separator and depth == 0:
            parts.append([])
        else:
            parts[-1].append(t)
    return [part for part in parts if part]


def text_of(tokens: list[Token]) -> str:
    return "".join(t.text for t in tokens)


class Translator:
    def __init__(self, text: str):
        self.tokens = list(tokenize(text))
        self.at = 0
        self.out: list[str] = []
        self.kernels: list[Kernel] = []
        self.templates: dict[str, Kernel] = {}

    def translate(self) -> tuple[str, list[Kernel]]:
        self.scope([])
        seen: set[str] = set()
        for k in self.kernels:
            if k.name in seen:
                raise CompileError(f"line {k.line}: two kernels are named {k.name}")
            seen.add(k.name)
        return "".join(self.out) + entries(self.kernels), self.kernels

    def scope(self, namespaces: list[str]) -> None:
        """Declarations at namespace scope, up to the end of the scope."""
        while self.at < len(self.tokens):
            head = self.take_head()
            end = self.tokens[self.at].text if self.at < len(self.tokens) else ""
            words = significant(head)
            if words and words[0].text == "namespace" and end == "{":
                self.out.append(text_of(head))
                self.copy_one()
                self.scope([*namespaces, *(t.text for t in words[1:] if t.kind == "word")])
                continue
            rest, attributes = split_attributes(head)
            plain = [t.text for t in significant(rest)]
            instantiation = plain[:1] == ["template"] and plain[1:2] != ["<"]
            if "kernel" in plain or "kernel" in attributes or (instantiation and "host_name" in attributes):
                rest = self.kernel(head, attributes, namespaces, instantiation)
            self.out.append(text_of(rest))
            if end == "}":
                self.copy_one()
                return
            if end == "{":
                self.body()
            elif end:
                self.copy_one()

    def take_head(self) -> list[Token]:
        """Up to the next `{`, `}` or `;` outside any bracket."""
        head: list[Token] = []
        depth = 0
        while self.at < len(self.tokens):
            t = self.tokens[self.at]
            if t.text in "{};" and depth == 0:
                break
            depth += {"(": 1, "[": 1, "[[": 2, ")": -1, "]": -1}.get(t.text, 0)
            head.append(t)
            self.at += 1
        return head

    def copy_one(self) -> None:
        self.out.append(self.tokens[self.at].text)
        self.at += 1

    def body(self) -> None:
        """A braced block. Memory of a threadgroup outlives the function that declares it: static."""
        self.copy_one()
        start = True
        while self.at < len(self.tokens):
            t = self.tokens[self.at]
            if t.text == "}":
                self.copy_one()
                return
            if t.text == "{":
                self.body()
                start = True
                continue
            if start and t.text == "threadgroup" and self.declares_storage():
                self.out.append("static ")
            if t.text == "[[":  # attributes of statements and fields
                begin = self.at
                while self.tokens[self.at].text != "]":
                    self.at += 1
                self.at += 2
                self.out.append("\n" * text_of(self.tokens[begin : self.at]).count("\n"))
                continue
            if t.kind not in ("space", "line"):
                start = t.text == ";"
            self.copy_one()

    def declares_storage(self) -> bool:
        for t in self.tokens[self.at :]:
            if t.text in ("*", "&"):
                return False
            if t.text in (";", "[", "="):
                return True
        return False

    def kernel(
        self, head: list[Token], attributes: dict[str, str], namespaces: list[str], instantiation: bool
    ) -> list[Token]:
        """Notes the kernel, or the template of kernels, and returns its head without attributes."""
        words = significant(head)
        line = words[0].line
        open_ = self.parameter_list(head)
        if open_ is None:  # template [[host_name("x")]] [[kernel]] decltype(f<T>) f<T>;
            rest, attributes = split_attributes(head)
            name = self.declared_name(significant(rest))
            template = self.template_of(name, namespaces, line)
            parameters = template.parameters
        else:
            inside, close = self.parameter_tokens(head, open_)
            before, attributes = split_attributes(head[:open_])
            after, more = split_attributes(head[close:])
            attributes |= more
            name = self.declared_name(significant(before))
            if "void" not in [t.text for t in significant(before)]:
                raise CompileError(f"line {line}: kernel {name} must return void")
            parameters = [self.parameter(part, name) for part in split(inside, ",")]
            template = self.template_of(name, namespaces, line) if instantiation else None
            if template and all(p.attribute == "" for p in parameters):
                parameters = template.parameters
            rest = before + split_attributes(head[open_:close])[0] + after
        check_parameters(name, line, parameters)
        if template and [(p.attribute, p.index) for p in parameters] != [
            (p.attribute, p.index) for p in template.parameters
        ]:
            raise CompileError(f"line {line}: kernel {name}: its template has other attributes")
        max_threads = int(attributes.get("max_total_threads_per_threadgroup", "0"))
        kernel = Kernel(name, "::" + "::".join([*namespaces, name]), line, parameters, max_threads)
        if words[0].text == "template" and not instantiation:
            self.templates["::".join([*namespaces, name])] = kernel
            return rest
        if template:
            kernel.max_threads = max_threads or template.max_threads
            if "host_name" not in attributes:
                raise CompileError(f"line {line}: an instantiated kernel {name} needs a host_name")
        kernel.name = attributes.get("host_name", name)
        if kernel.name == "main":
            raise CompileError(f"line {line}: a kernel may not be named main")
        self.kernels.append(kernel)
        return rest

    def parameter_list(self, head: list[Token]) -> int | None:
        """Where the parameters' bracket opens: the first outside attributes and decltype."""
        depth = 0
        angle = 0
        previous = ""
        for i, t in enumerate(head):
            if t.text == "[[":
                depth += 2
            elif t.text == "]" or (t.text == "[" and depth):
                depth += 1 if t.text == "[" else -1
            elif depth == 0:
                if t.text in "<>":
                    angle += 1 if t.text == "<" else -1
                elif t.text == "(" and angle == 0:
                    return None if previous == "decltype" else i
            if t.kind not in ("space", "line"):
                previous = t.text
        return None

    @staticmethod
    def parameter_tokens(head: list[Token], open_: int) -> tuple[list[Token], int]:
        depth = 0
        for i in range(open_, len(head)):
            depth += {"(": 1, ")": -1}.get(head[i].text, 0)
            if depth == 0:
                return significant(head[open_ + 1 : i]), i
        raise CompileError(f"line {head[open_].line}: a parameter list that does not end")

    @staticmethod
    def declared_name(before: list[Token]) -> str:
        """`f` or `f<T, 8>` at the end of what stands before the parameters."""
        end = len(before)
        start = end - 1
        if before[start].text == ">":
            depth = 0
            while True:
                depth += {">": 1, "<": -1}.get(before[start].text, 0)
                if depth == 0:
                    break
                start -= 1
            start -= 1
        while start >= 2 and before[start - 1].text == "::":
            start -= 2
        text = ""
        for t in before[start:end]:
            text += f" {t.text}" if t.kind == "word" and text[-1:].isalnum() else t.text
        return text

    def template_of(self, name: str, namespaces: list[str], line: int) -> Kernel:
        base = name.split("<")[0]
        for qualified in ("::".join([*namespaces[:i], base]) for i in range(len(namespaces), -1, -1)):
            if qualified in self.templates:
                return self.templates[qualified]
        raise CompileError(f"line {line}: no kernel template {base} before its instantiation")

    @staticmethod
    def parameter(tokens: list[Token], kernel: str) -> Parameter:
        rest, attributes = split_attributes(tokens)
        names = [t.text for t in split(rest, "=")[0] if t.kind == "word"]
        name = names[-1]
        if not attributes:
            return Parameter(name, "", None)
        attribute, argument = next(iter(attributes.items()))
        if attribute == "buffer":
            if not argument.isdigit():
                raise CompileError(f"line {tokens[0].line}: kernel {kernel}: buffer({argument}) is no number")
            return Parameter(name, attribute, int(argument))
        if attribute not in POSITIONS and attribute != "threads_per_simdgroup":
            raise CompileError(
                f"line {tokens[0].line}: kernel {kernel}: [[{attribute}]] is not something the emulator knows"
            )
        return Parameter(name, attribute, None)


def check_parameters(kernel: str, line: int, parameters: list[Parameter]) -> None:
    taken: dict[int, str] = {}
    for p in parameters:
        if not p.attribute:
            raise CompileError(f"line {line}: kernel {kernel}: argument {p.name} has no attribute")
        if p.index is None:
            continue
        if p.index > 30:
            raise CompileError(
                f"line {line}: kernel {kernel}: argument {p.name} is buffer({p.index}), but Metal has 31: 0 to 30"
            )
        if p.index in taken:
            raise CompileError(
                f"line {line}: kernel {kernel}: arguments {taken[p.index]} and {p.name} are both buffer({p.index})"
            )
        taken[p.index] = p.name


def entries(kernels: list[Kernel]) -> str:
    """C++ that calls each kernel as the runtime does, and the table of them."""
    lines = [f"\n{ENTRIES}", "namespace metal_emulator {"]
    for n, k in enumerate(kernels):
        buffers = [(i, p) for i, p in enumerate(k.parameters) if p.attribute == "buffer"]
        lines += [
            f"struct Entry{n} {{",
            f"  typedef decltype({k.function}) Function;",
            "  static void run(const Thread* t) {",
            f"    {k.function}({', '.join(p.bound(i) for i, p in enumerate(k.parameters))});",
            "  }",
            "};",
            f"const Argument arguments{n}[] = {{",
            *(
                f'  argument<ParameterOf<{i}, Entry{n}::Function>>("{p.name}", {p.index}u),'
                for i, p in buffers
            ),
            "  {}",
            "};",
        ]
    rows = [
        f'  {{"{k.name}", Entry{n}::run, arguments{n}, '
        f"{sum(p.attribute == 'buffer' for p in k.parameters)}u, {k.max_threads}u}},"
        for n, k in enumerate(kernels)
    ]
    lines += [
        'extern "C" __attribute__((visibility("default"))) const Kernel metal_emulator_kernels[] = {',
        *rows,
        "  {}",
        "};",
        "}  // namespace metal_emulator",
        "",
    ]
    return "\n".join(lines)
