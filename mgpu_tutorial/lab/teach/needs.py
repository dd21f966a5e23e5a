"""What a function of a cell needs to live in a file of its own: imports, helpers, values.

A name of the cell is written as what it is now: a function or class with its source, a plain
value, an import. What it borrows of this package is written down too, read from the package's
files, so that the file needs torch and Python only.
"""

import ast
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from mgpu_tutorial.lab.teach.source import source_of

OURS = __name__.partition(".")[0]
PLAIN = sys.stdlib_module_names | {"torch"}
LONGEST = 60  # lines of a function that is copied; a longer one is imported where it is used


class NotKept(Exception):
    """Why something cannot stand in the reader's library."""


class Thing(NamedTuple):
    """One statement of the file: its name and text, and the things that names in it mean."""

    key: tuple
    chapter: str
    kind: str  # built, helper, borrowed or import
    name: str
    text: str
    uses: dict[str, tuple]


def needs(
    chapter: str,
    functions: Sequence[Callable],
    built: Mapping[str, str],
    ours: Mapping[str, Callable],
) -> tuple[list[Thing], list[str]]:
    """What must be written for functions of a cell, each thing after those that it uses.

    `built` are the builds that the file has, with their chapters; they are used in place of
    the package's own, which for this chapter are `ours`. Returns also what the reader should
    know besides.
    """
    search = _Search(chapter, functions, built, ours)
    for function in functions:
        search.of_cell(function.__name__, function)
    return [search.things[key] for key in search.order], list(dict.fromkeys(search.notes))


class _Search:
    def __init__(
        self, chapter: str, functions: Sequence[Callable], built: Mapping, ours: Mapping
    ) -> None:
        self.chapter, self.built = chapter, built
        self.wanted = {function.__name__ for function in functions}
        self.own = {
            (thing.__module__, name)
            for name, thing in ours.items()
            if built.get(name) == chapter or name in self.wanted
        }
        self.home = functions[0].__module__
        self.around = vars(sys.modules[self.home])
        self.things: dict[tuple, Thing] = {}
        self.order: list[tuple] = []
        self.notes: list[str] = []

    def add(self, thing: Thing) -> tuple:
        if thing.key not in self.order:
            self.order.append(thing.key)
        self.things[thing.key] = thing
        return thing.key

    def of_cell(self, name: str, thing: Any) -> tuple:
        """A function or class of the notebook."""
        key = (self.home, name)
        if key in self.things:
            return key
        kind = "built" if name in self.wanted else "helper"
        text = _statement(name, thing)
        self.things[key] = Thing(key, self.chapter, kind, name, text, {})
        uses = {}
        for used in sorted(names_in(text) - {name}):
            if used in self.around:
                uses[used], text = self.of_value(used, self.around[used], text)
        return self.add(Thing(key, self.chapter, kind, name, text, drop_none(uses)))

    def of_value(self, name: str, value: Any, text: str) -> tuple[tuple | None, str]:
        """What a name of the notebook means; `text` uses it, and may have to import it."""
        home, own = getattr(value, "__module__", None), getattr(value, "__name__", name)
        if isinstance(value, ModuleType):
            if own.partition(".")[0] == OURS:
                return self.namespace((self.home, name), self.chapter, name, own, text)
            return self.foreign(name, own, "", text)
        if home == self.home and isinstance(value, FunctionType | type):
            return self.of_cell(name, value), text
        if home == "mine" and own in self.built:  # of an earlier chapter
            return ("built", own), text
        if isinstance(home, str) and hasattr(value, "__name__") and own.isidentifier():
            if home.partition(".")[0] == OURS:
                return self.of_package(home, own, name, text)
            if module := _module_of(home, own, value):
                return self.foreign(name, module, own, text)
        written = _literal(value)
        if written is None:
            for module in [m for m in sys.modules if m.partition(".")[0] == OURS]:
                if vars(sys.modules[module]).get(name) is value and name in _bound(module):
                    return self.of_package(module, name, name, text)
            if module := _module_of(home, own, value):
                return self.foreign(name, module, own, text)
            raise NotKept(
                f"{name} of your notebook, {type(value).__name__} {value!r:.40}, cannot be "
                "written into a file: make it inside the function, or take it as an argument"
            )
        if isinstance(value, torch.dtype):
            written = f"{value}"
            use, _ = self.foreign("torch", "torch", "", text)
            uses = {"torch": use}
        else:
            uses = {}
        key = (self.home, name)
        return self.add(
            Thing(key, self.chapter, "helper", name, f"{name} = {written}", uses)
        ), text

    def foreign(
        self, name: str, module: str, own: str, text: str
    ) -> tuple[tuple | None, str]:
        """An import: at the top of torch and Python, else where it is used."""
        as_name = "" if name == (own or module) else f" as {name}"
        line = f"from {module} import {own}{as_name}" if own else f"import {module}{as_name}"
        if module.partition(".")[0] not in PLAIN:
            return None, inside(text, name, line)
        return self.add(Thing(("import", line), "", "import", name, line, {})), line and text

    def namespace(
        self, key: tuple, chapter: str, name: str, module: str, text: str
    ) -> tuple[tuple | None, str]:
        """A module of the package, of which the text uses some functions."""
        uses = dict(self.things[key].uses) if key in self.things else {}
        try:
            for used in _attributes(text, name):
                uses[used], _ = self.of_package(module, used, used, None)
        except _TooMuch:
            return self.imported(name, module, "", text)
        line = "from types import SimpleNamespace"
        space = self.add(Thing(("import", line), "", "import", "SimpleNamespace", line, {}))
        inner = ", ".join(
            f"{used}={used}" for used in sorted(uses) if used != "SimpleNamespace"
        )
        uses["SimpleNamespace"] = space
        made = f"{name} = SimpleNamespace({inner})"
        kind = "borrowed" if key[0] != self.home else "helper"
        if key in self.order:
            self.order.remove(key)
        return self.add(Thing(key, chapter, kind, name, made, uses)), text

    def imported(self, name: str, module: str, own: str, text: str | None):
        """What is too much to be copied is imported inside of the function."""
        if text is None:
            raise _TooMuch
        as_name = "" if name == own else f" as {name}"
        line = f"from {module} import {own}{as_name}" if own else f"import {module} as {name}"
        self.notes.append(f"{name} is imported from this package where it is used.")
        return None, inside(text, name, line)

    def of_package(
        self, module: str, own: str, name: str, text: str | None
    ) -> tuple[tuple | None, str]:
        """A function, class or constant of this package, with what it needs."""
        if self.is_built(module, own):
            return ("built", own), text
        before = list(self.order), dict(self.things)
        try:
            return self.copied(module, own), text
        except _TooMuch:
            self.order, self.things = before
            return self.imported(name, module, own, text)

    def is_built(self, module: str, own: str) -> bool:
        """Whether the reader's own build stands for what the package has there."""
        return (module, own) in self.own or self.built.get(own) == chapter_of(module)

    def copied(self, module: str, own: str) -> tuple:
        key = (module, own)
        if key in self.things:
            return key
        chapter = chapter_of(module)
        if chapter == "lab":  # the equipment hangs together
            raise _TooMuch
        node = _bound(module).get(own)
        if isinstance(node, ast.Import | ast.ImportFrom):
            return self.reimported(module, own, node)
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign):
            raise _TooMuch
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        if node.end_lineno - first >= LONGEST or len(root(node)) > 1:
            raise _TooMuch
        text = "\n".join(_lines(module)[first - 1 : node.end_lineno])
        text = without_types(text)
        self.things[key] = Thing(key, chapter, "borrowed", own, text, {})
        uses = {}
        for used in sorted(names_in(text) - {own}):
            where = _bound(module).get(used)
            if where is None:
                continue
            if self.is_built(module, used):
                uses[used] = ("built", used)
                continue
            is_from = isinstance(where, ast.ImportFrom) and where.module.startswith(OURS)
            if home := find_module(where, used) if is_from else None:
                uses[used], text = self.namespace((module, used), chapter, used, home, text)
                continue
            before = list(self.order), dict(self.things)
            try:
                uses[used] = self.copied(module, used)
            except _TooMuch:
                self.order, self.things = before
                _, text = self.imported(used, module, used, text)
                if text.startswith("def _make_"):
                    raise
        return self.add(Thing(key, chapter, "borrowed", own, text, drop_none(uses)))

    def reimported(self, module: str, name: str, node: ast.Import | ast.ImportFrom) -> tuple:
        """A name that a module of the package imports."""
        for alias in node.names:
            if (alias.asname or alias.name.partition(".")[0]) != name:
                continue
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == OURS:
                if self.is_built(node.module, alias.name):
                    return ("built", alias.name)
                return self.copied(node.module, alias.name)
            one = ast.unparse(
                ast.ImportFrom(node.module, [alias], 0)
                if isinstance(node, ast.ImportFrom)
                else ast.Import([alias])
            )
            top = node.module if isinstance(node, ast.ImportFrom) else alias.name
            if top.partition(".")[0] not in PLAIN:
                raise _TooMuch
            return self.add(Thing(("import", one), "", "import", name, one, {}))
        raise _TooMuch


class _TooMuch(Exception):
    """It is no plain function or class, or too long to be copied."""


def chapter_of(module: str) -> str:
    """The part of the package where a module lies."""
    return [*module.split("."), module][1]


def drop_none(uses: dict) -> dict:
    return {name: key for name, key in uses.items() if key is not None}


def find_module(node: ast.ImportFrom, name: str) -> str | None:
    """The module of the package that `from … import name` gives, if it is one."""
    for alias in node.names:
        if (alias.asname or alias.name) == name:
            full = f"{node.module}.{alias.name}"
            try:
                return full if find_spec(full) else None
            except ModuleNotFoundError:
                return None
    return None


def _lines(module: str) -> list[str]:
    return Path(find_spec(module).origin).read_text(encoding="utf-8").split("\n")


def _bound(module: str) -> dict[str, ast.stmt]:
    """The statement of a module that makes each of its names."""
    body = ast.parse("\n".join(_lines(module))).body
    return {name: node for node in body for name in root(node)}


def root(node: ast.stmt) -> set[str]:
    """The names that a statement makes."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return {node.name.removeprefix("_make_")}
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.alias):
            found.add(part.asname or part.name.partition(".")[0])
        elif isinstance(part, ast.FunctionDef | ast.ClassDef):
            found.add(part.name)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            found.add(part.id)
    return found


def _statement(name: str, thing: Any) -> str:
    """The source of a function or class of a cell, which is one statement of that name."""
    try:
        text = source_of(thing)
        (node,) = ast.parse(text).body
        assert root(node) == {name}
    except (OSError, TypeError, ValueError, SyntaxError, AssertionError) as error:
        raise NotKept(
            f"{name} of your notebook cannot be written into a file: give it a `def` or "
            "`class` of its own"
        ) from error
    return text


def _literal(value: Any) -> str | None:
    """A plain value as source, or None."""
    if isinstance(value, torch.dtype):
        return repr(value)
    if type(value) is float and (value != value or value in (float("inf"), -float("inf"))):
        return f'float("{value}")'
    try:
        same = ast.literal_eval(repr(value))
        return repr(value) if same == value and type(same) is type(value) else None
    except Exception:  # a repr that is no source, a comparison that is no truth
        return None


def _module_of(home: str | None, own: str, value: Any) -> str | None:
    """Where a name can be imported from."""
    private = not home or "._" in f".{home}"
    top = (home or "torch").partition(".")[0]
    others = [m for m in sys.modules if m.partition(".")[0] == top and "._" not in f".{m}"]
    others = sorted(others, key=lambda m: (m.count("."), m))
    for module in [*others, home] if private else [home, *others]:
        found = getattr(sys.modules.get(module or ""), "__dict__", {})
        if module != "__main__" and found.get(own) is value:
            return module
    return None


def _attributes(text: str, name: str) -> list[str]:
    """What the text takes of a module; _TooMuch where it takes the module itself."""
    tree = ast.parse(text)
    taken = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
    ]
    own = [n.attr for n in taken if n.value.id == name]
    every = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == name]
    if len(own) != len(every):
        raise _TooMuch
    return sorted(set(own))


def inside(text: str, name: str, line: str) -> str:
    """The text with an import in each function that uses the name, or made on demand."""
    (node,) = ast.parse(text).body
    if text.startswith("def _make_"):
        first = node.body[0]
        lines = text.split("\n")
        return "\n".join(
            [*lines[: first.lineno - 1], f"    {line}", *lines[first.lineno - 1 :]]
        )
    bodies = [node] if isinstance(node, ast.FunctionDef) else node.body
    methods = [part for part in bodies if isinstance(part, ast.FunctionDef)]
    rest = sum(_uses(part, name) for part in ast.walk(node))
    within = {
        id(m): sum(_uses(n, name) for s in m.body for n in ast.walk(s)) for m in methods
    }
    oneline = any(within[id(m)] and m.body[0].lineno == m.lineno for m in methods)
    if sum(within.values()) < rest or oneline:
        made = textwrap.indent(text, "    ")
        return f"def _make_{node.name}():\n    {line}\n\n{made}\n\n    return {node.name}"
    lines = text.split("\n")
    for method in reversed([m for m in methods if within[id(m)]]):
        first = method.body[1 if ast.get_docstring(method) and method.body[1:] else 0]
        start = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", []))])
        lines.insert(start - 1, " " * first.col_offset + line)
    return "\n".join(lines)


def without_types(text: str) -> str:
    """A copy without the types of arguments and results, which need many an import."""
    rows = [row.encode() for row in text.split("\n")]
    starts = [sum(len(row) + 1 for row in rows[:i]) for i in range(len(rows))]
    whole, cuts = b"\n".join(rows), []
    for node in ast.walk(ast.parse(text)):
        typed = (
            node.annotation if isinstance(node, ast.arg) else getattr(node, "returns", None)
        )
        if typed is None:
            continue
        begin = starts[typed.lineno - 1] + typed.col_offset
        end = starts[typed.end_lineno - 1] + typed.end_col_offset
        begin = whole.rindex(b":" if isinstance(node, ast.arg) else b"->", 0, begin)
        while whole[begin - 1 : begin] == b" ":
            begin -= 1
        gap = re.match(rb" *= *", whole[end:]) if isinstance(node, ast.arg) else None
        cuts.append((begin, end + (gap.end() if gap else 0), b"=" if gap else b""))
    for begin, end, instead in sorted(cuts, reverse=True):
        whole = whole[:begin] + instead + whole[end:]
    return whole.decode()


def _uses(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def tables(source: str) -> Iterator[symtable.SymbolTable]:
    waiting = [symtable.symtable(source, "cell", "exec")]
    while waiting:
        table = waiting.pop()
        yield table
        waiting += table.get_children()


def names_in(source: str) -> set[str]:
    """All names from outside that the source of a function or class uses."""
    symbols = [symbol for table in tables(source) for symbol in table.get_symbols()]
    return {
        s.get_name()
        for s in symbols
        if s.is_global() and (s.is_referenced() or s.is_declared_global())
    }


def renamed(text: str, names: Mapping[str, str]) -> str:
    """The text with other names for things of the module; NotKept where that is not safe."""
    if not names:
        return text
    for table in tables(text):
        for symbol in table.get_symbols() if table.get_type() != "module" else []:
            if symbol.get_name() in names and not (symbol.is_global() or symbol.is_free()):
                raise NotKept(
                    f"{symbol.get_name()} is taken in the file, and in yours it has two "
                    "meanings: give yours another name"
                )
    spots = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and node.id in names:
            spots.append((node.lineno, node.col_offset, node.id, names[node.id]))
        elif isinstance(node, ast.alias):
            name = node.asname or node.name
            if name in names:
                whole = node.name + (f" as {node.asname}" if node.asname else "")
                spots.append(
                    (node.lineno, node.col_offset, whole, f"{node.name} as {names[name]}")
                )
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
            line = text.split("\n")[node.lineno - 1].encode()
            at = line.index(node.name.encode(), node.col_offset + 4)
            spots.append((node.lineno, at, node.name, names[node.name]))
        elif isinstance(node, ast.Global) and names.keys() & set(node.names):
            line = text.split("\n")[node.lineno - 1]
            for name in names.keys() & set(node.names):
                at = re.search(rf"\b{name}\b", line).start()
                spots.append((node.lineno, len(line[:at].encode()), name, names[name]))
    lines = [line.encode() for line in text.split("\n")]
    for number, at, old, new in sorted(set(spots), reverse=True):
        line = lines[number - 1]
        if line[at : at + len(old.encode())] != old.encode():
            raise NotKept(f"{old} is taken in the file: give yours another name")
        lines[number - 1] = line[:at] + new.encode() + line[at + len(old.encode()) :]
    return b"\n".join(lines).decode()
