"""What functions of a notebook need to live in a file of their own.

Each name in their text is followed. A function or class of the notebook or of this package is
written down with what it needs in turn, a plain value as it is now, and what torch and Python
have is imported: so the file needs torch and Python only.
"""

import ast
import inspect
import re
import symtable
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import cache, partial
from logging import Logger
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from mgpu_tutorial.lab.teach.source import cells, comments_above, namespace_of, source_of

OURS = __name__.partition(".")[0]
MINE = "mine"  # the module that is the reader's file
PLAIN = sys.stdlib_module_names | {"torch"}
SLOW = (  # half a second and more to import, which only what uses it should cost
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.nn.attention.flex_attention",
)
LONGEST = 200  # lines of a function that is copied; a longer one is imported where it is used
STAND_INS = {  # what is written for a function that real devices do not need
    "place": '''def place(thing, device):
    """Copy a tensor to `device`, or move a module there."""
    return thing.to(device)'''
}


class NotKept(Exception):
    """Why something cannot stand in the reader's library."""


class Thing(NamedTuple):
    """A statement of the file; `uses` has the key of what each name in its text means."""

    key: tuple
    chapter: str
    kind: str  # built, helper, borrowed or import
    name: str
    text: str
    uses: Mapping[str, tuple]
    above: Sequence[str] = ()  # the reader's comments


def needs(
    chapter: str, functions: Sequence, built: Mapping[str, str], ours: Mapping
) -> tuple[list[Thing], list[str]]:
    """What must be written for functions of a cell, each thing after those that it uses.

    `built` are the builds that the file has, with their chapters: they are used in place of
    the package's own, which for this chapter are `ours`. Returns also what the reader should
    know besides.
    """
    search = _Search(chapter, functions, built, ours)
    for function in functions:
        search.written(function.__name__, function, chapter)
    things = [search.with_known_types(thing) for thing in search.things.values()]
    return things, [*search.notes]


class _Search:
    def __init__(
        self, chapter: str, functions: Sequence, built: Mapping[str, str], ours: Mapping
    ) -> None:
        self.chapter, self.built = chapter, built
        self.home = functions[0].__module__
        self.wanted = {function.__name__ for function in functions}
        known = [name for name in ours if name in self.wanted or built.get(name) == chapter]
        self.own = {(ours[name].__module__, name) for name in known}
        self.things: dict[tuple, Thing] = {}
        self.notes: dict[str, None] = {}  # each once
        self.left: dict[tuple, dict[str, tuple]] = {}  # types that nobody may need
        self.seen: set[tuple] = set()

    def add(self, *thing: Any) -> tuple:
        key, *_ = thing
        self.things.setdefault(key, Thing(*thing))
        return key

    def written(self, name: str, thing: Any, chapter: str) -> tuple:
        """A function or class, whose text is written into the file."""
        key = (thing.__module__, name)
        if key not in self.seen:
            self.seen.add(key)
            text, around = _statement(name, thing), namespace_of(thing)
            kind = "borrowed" if key[0] != self.home else "helper"
            above = comments_above(thing) if kind == "helper" else []
            if kind == "borrowed":
                self.left[key] = {
                    used: (around[used].__module__, around[used].__name__)
                    for used in only_types(text) & around.keys()
                    if _is_of_the_course(around[used])
                }
            text, uses = self.followed(text, name, around, {*self.left.get(key, ())})
            kind = "built" if name in self.wanted else kind
            self.add(key, chapter, kind, name, text, uses, above)
        return key

    def with_known_types(self, thing: Thing) -> Thing:
        """Without an annotation that names a class of the course's which nothing needs."""
        gone = [
            name for name, key in self.left.get(thing.key, {}).items() if not self.has(key)
        ]
        return thing._replace(text=without_types(thing.text, gone)) if gone else thing

    def has(self, key: tuple) -> bool:
        return (
            key in self.things
            or key in self.own
            or self.built.get(key[1]) == chapter_of(key[0])
        )

    def followed(
        self, text: str, name: str, around: Mapping, left: Set[str] = frozenset()
    ) -> tuple[str, dict]:
        """The text with the imports that must stand inside it, and what its names mean."""
        uses = {}
        for used in sorted((names_in(text) - {name, "__name__"} - left) & around.keys()):
            value, parts = around[used], _attributes(text, used)
            is_space = isinstance(value, SimpleNamespace) or _is_ours(value)
            if is_space and parts is not None:  # of `stages.send` the function is written
                found = {f"{used}.{p}": (p, getattr(value, p), vars(value)) for p in parts}
                line = f"import {getattr(value, '__name__', used)} as {used}"
            else:
                found, line = {used: (used, value, around)}, ""
            for label, what in found.items():
                meant = self.meaning(*what)
                is_late = isinstance(meant, str) and _top(meant.split()[1]) in PLAIN
                if is_late and not in_bodies(text, used):  # a base, say, or a type
                    meant = self.add(("import", meant), "", "import", used, meant, {})
                if isinstance(meant, tuple):
                    uses[label] = meant
                elif (line or meant) not in text:
                    text = inside(text, used, line or meant)
        return text, uses

    def meaning(self, name: str, value: Any, around: Mapping) -> tuple | str:
        """The key of what a name means, or the import that must stand where it is used."""
        home, own = getattr(value, "__module__", None), getattr(value, "__name__", None)
        if isinstance(value, ModuleType):
            return self.imported(name, own, "")
        if isinstance(inspect.unwrap(value), FunctionType | type):
            if home == self.home:
                return self.written(name, value, self.chapter)
            if home == MINE and own in self.built:
                return ("built", own)
            if _top(home) == OURS:
                return self.of_package(name, own, home, value)
        where = around.get("__name__", self.home)
        is_lent = _top(where) == OURS
        chapter = chapter_of(where) if is_lent else self.chapter
        kind = "borrowed" if is_lent else "helper"
        if text := "" if is_lent else _made_in_cell(name, value, around):
            key = ("statement", chapter, text)
            text, uses = self.followed(text, name, around)
            return self.add(key, chapter, kind, name, text, uses)
        for module, text in _assignments(name, value, where):
            text, uses = self.followed(text, name, vars(sys.modules[module]))
            lender = chapter_of(module)
            return self.add((module, name), lender, "borrowed", name, text, uses)
        if text := _literal(value):
            text, uses = self.followed(f"{name} = {text}", name, {"torch": torch})
            return self.add(("value", chapter, text, name), chapter, kind, name, text, uses)
        if module := _module_of(home, own or name, value):
            return self.imported(name, module, own or name)
        if is_lent:
            return self.imported(name, where, name)
        raise NotKept(
            f"{name} of your notebook, {type(value).__name__} {value!r:.40}, cannot be "
            "written into a file: make it inside the function, or take it as an argument"
        )

    def of_package(self, name: str, own: str, home: str, value: Any) -> tuple | str:
        """A function or class of this package, or what the reader has built in its place."""
        chapter = chapter_of(home)
        if (home, own) in self.own or self.built.get(own) == chapter:
            return ("built", own)
        if chapter == "lab" and own in STAND_INS:
            return self.add((home, own), chapter, "borrowed", own, STAND_INS[own], {})
        if chapter == "lab" or source_of(value).count("\n") >= LONGEST:
            return self.imported(name, home, own)
        return self.written(own, value, chapter)

    def imported(self, name: str, module: str, own: str) -> tuple | str:
        """An import: of torch and Python at the top; a slow one, or another's, inside."""
        if not own and "." in module and module.endswith(f".{name}"):
            module, _, own = module.rpartition(".")  # `from torch import nn`
        as_name = "" if name == (own or module) else f" as {name}"
        line = f"from {module} import {own}{as_name}" if own else f"import {module}{as_name}"
        if _top(module) in PLAIN and not is_slow(f"{module}.{own}"):
            return self.add(("import", line), "", "import", name, line, {})
        if _top(module) == OURS:
            self.notes[f"{name} is imported from this package where it is used."] = None
        elif _top(module) not in PLAIN:
            self.notes[
                f"{name} comes from {_top(module)}, which is not in the file: wherever you "
                f"take the file, {_top(module)} has to be there too."
            ] = None
        return line


def is_slow(module: str) -> bool:
    """Whether the import of a module, or of something in it, takes long."""
    return any(f"{module}.".startswith(f"{slow}.") for slow in SLOW)


def chapter_of(module: str) -> str:
    """The part of the package where a module lies."""
    return [*module.split("."), module][1]


def _top(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


def _is_ours(value: Any) -> bool:
    """Whether it is a module of this package."""
    return isinstance(value, ModuleType) and _top(value.__name__) == OURS


def _statement(name: str, thing: Any) -> str:
    """The source of a function or class, which is one statement of that name."""
    if hasattr(thing, "registry") and hasattr(thing, "dispatch"):  # by singledispatch
        raise NotKept(
            f"{name} of your notebook has a function for each type, of which a file would "
            "get the first only: tell the types apart inside it, by isinstance"
        )
    try:
        text, plain = source_of(thing), inspect.unwrap(thing)
        (node,) = ast.parse(text).body
        assert root(node) == {name} and "<locals>" not in plain.__qualname__
        assert plain is thing or node.decorator_list
    except (OSError, TypeError, ValueError, SyntaxError, AssertionError) as error:
        raise NotKept(
            f"{name} of your notebook cannot be written into a file: give it a `def` or "
            "`class` of its own"
        ) from error
    return text


def _literal(value: Any) -> str | None:
    """A plain value as source, or None."""
    if isinstance(value, torch.dtype | torch.device):
        return f"torch.{value!r}".replace("torch.torch.", "torch.")
    if type(value) is float and (value != value or value in (float("inf"), -float("inf"))):
        return f'float("{value}")'
    try:
        same = ast.literal_eval(repr(value))
        return repr(value) if same == value and type(same) is type(value) else None
    except Exception:  # a repr that is no source, a comparison that is no truth
        return None


def _made_in_cell(name: str, value: Any, around: Mapping) -> str | None:
    """The statement of a notebook that makes a value, as it stands there.

    That is an alias of what has a name elsewhere, a partial or a logger: made anew it is the
    same. What any other call returns may be large, or may have been changed since.
    """
    for source in reversed(cells()):
        with suppress(Exception):  # a magic of IPython; a name that is gone
            for node in reversed(ast.parse(source).body):
                is_made = isinstance(node, ast.Assign | ast.AnnAssign)
                if not is_made or root(node) != {name} or not _is_plain(node.value, value):
                    continue
                made = eval(compile(ast.Expression(node.value), "cell", "eval"), {**around})
                if _means(made) == _means(value):
                    return ast.get_source_segment(source, node)
    return None


def _is_plain(node: ast.expr, value: Any) -> bool:
    """Whether an expression calls nothing, or makes a partial or a logger of such."""
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    return not calls or (calls == [node] and isinstance(value, partial | Logger))


def _means(value: Any) -> Any:
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    return value


def _assignments(name: str, value: Any, where: str) -> Iterator[tuple[str, str]]:
    """The modules of the package that make this value, and the statement that does."""
    is_plain = (
        _literal(value) is not None
    )  # it looks the same in modules that do not share it
    for key in [where] if is_plain else [where, *sorted(sys.modules)]:
        module = sys.modules.get(key)
        if _top(key) == OURS and getattr(module, name, None) is value:
            for text in _assigned_in(inspect.getsource(module)).get(name, ()):
                yield key, text


@cache
def _assigned_in(text: str) -> dict[str, list[str]]:
    """The assignments to one name in a module's text, by that name."""
    lines, found = text.split("\n"), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and len(names := root(node)) == 1:
            statement = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            found.setdefault(*names, []).append(statement)
    return found


def _module_of(home: str | None, own: str, value: Any) -> str | None:
    """Where a name can be imported from: where its library shows it, rather than makes it."""
    private = not home or "._" in f".{home}"
    top = _top(home or "torch")
    steps = (home or "").split(".")
    above = [] if top == OURS else [".".join(steps[:n]) for n in range(1, len(steps))]
    above = [module for module in above if "._" not in f".{module}"]
    others = [m for m in sys.modules if _top(m) == top and "._" not in f".{m}"]
    others = sorted(others, key=lambda m: (m.count("."), m))
    if home and isinstance(value, FunctionType | type) and home in sys.modules:
        lists = {m: getattr(sys.modules[m], "__dict__", {}).get("__all__") for m in others}
        shown = [m for m, names in lists.items() if own in (names or ())]
        others = [*shown, home, *others]  # and not where somebody else only uses it
    for module in [*above, *others, home] if private else [*above, home, *others]:
        found = getattr(sys.modules.get(module or ""), "__dict__", {})
        if module != "__main__" and found.get(own) is value:
            return module
    return None


def _annotations(text: str) -> list[tuple[ast.AST, ast.expr]]:
    """The types of a text, each with the argument or the function that has it."""
    nodes = [*ast.walk(ast.parse(text))]
    own = [(node, node.annotation) for node in nodes if isinstance(node, ast.arg)]
    own += [(node, node.returns) for node in nodes if isinstance(node, ast.FunctionDef)]
    return [(node, kind) for node, kind in own if kind]


def names_of_type(kind: ast.expr) -> set[str]:
    """The names in a type, also in quotes."""
    found = set()
    for part in ast.walk(kind):
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            found |= names_in(part.value)
    return found


def names_of_types(text: str) -> set[str]:
    """The names in the types of arguments and results."""
    return set().union(*(names_of_type(kind) for _, kind in _annotations(text)))


def only_types(text: str) -> set[str]:
    """The names that stand in the types of arguments and results, and nowhere else."""
    kinds, tree = [kind for _, kind in _annotations(text)], ast.parse(text)
    names = {
        part.id for kind in kinds for part in ast.walk(kind) if isinstance(part, ast.Name)
    }
    return {name for name in names if _count(name, *kinds) == _count(name, tree)}


def without_types(text: str, names: Sequence[str]) -> str:
    """The text without the types of arguments and results that have one of these names."""
    lines = [line.encode() for line in text.split("\n")]
    own = [of for of in _annotations(text) if names_of_type(of[1]) & {*names}]
    for node, kind in sorted(own, key=lambda of: (-of[1].lineno, -of[1].col_offset)):
        line = lines[kind.lineno - 1]
        if kind.lineno == kind.end_lineno:
            start, rest = line[: kind.col_offset], line[kind.end_col_offset :]
            is_argument = isinstance(node, ast.arg)
            start = start.rstrip().removesuffix(b":" if is_argument else b"->").rstrip()
            rest = re.sub(rb"^ = ", b"=", rest)
            lines[kind.lineno - 1] = start + rest
    return b"\n".join(lines).decode()


def _is_of_the_course(kind: Any) -> bool:
    """Whether a class needs the course around it; a protocol says what anybody can write."""
    is_class = isinstance(kind, type) and _top(kind.__module__) == OURS
    return is_class and not getattr(kind, "_is_protocol", False)


def root(node: ast.stmt) -> set[str]:
    """The names that a statement makes."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return {node.name.removeprefix("_make_")}
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.alias):
            found.add(name_of(part))
        elif isinstance(part, ast.FunctionDef | ast.ClassDef):
            found.add(part.name)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            found.add(part.id)
    return found


def name_of(alias: ast.alias) -> str:
    """What an import binds."""
    return alias.asname or _top(alias.name)


def _count(name: str, *nodes: ast.AST) -> int:
    """How often a name stands in some statements."""
    every = (part for node in nodes for part in ast.walk(node))
    return sum(isinstance(part, ast.Name) and part.id == name for part in every)


def _attributes(text: str, name: str) -> list[str] | None:
    """What the text reads of a module; None where it takes the module itself."""
    tree = ast.parse(text)
    taken = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
        and isinstance(node.ctx, ast.Load)
    ]
    return sorted(set(taken)) if len(taken) == _count(name, tree) else None


def inside(text: str, name: str, line: str) -> str:
    """The text with an import in each function that uses the name.

    A class that needs it to be made at all is made when it is asked for.
    """
    (node,) = ast.parse(text).body
    users = _users(node, name)
    if not in_bodies(text, name):
        made = textwrap.indent(text, "    ")
        return f"def _make_{node.name}():\n    {line}\n\n{made}\n\n    return {node.name}"
    lines = text.split("\n")
    for user in reversed(users):
        first = user.body[1 if ast.get_docstring(user) and user.body[1:] else 0]
        start = first_line(first) - 1
        gap = [""] * (not lines[start].lstrip().startswith(("import ", "from ")))
        lines[start:start] = [" " * first.col_offset + line, *gap]
    return "\n".join(lines)


def _users(node: ast.stmt, name: str) -> list[ast.FunctionDef]:
    """The function, or the methods of the class, that use a name in their body."""
    functions = [node] if isinstance(node, ast.FunctionDef) else getattr(node, "body", [])
    functions = [part for part in functions if isinstance(part, ast.FunctionDef)]
    return [part for part in functions if _count(name, *part.body)]


def in_bodies(text: str, name: str) -> bool:
    """Whether a name stands in bodies of functions alone, on lines below their `def`."""
    (node,) = ast.parse(text).body
    users = _users(node, name)
    inside = sum(_count(name, *user.body) for user in users)
    return inside == _count(name, node) and all(u.body[0].lineno > u.lineno for u in users)


def first_line(node: ast.stmt) -> int:
    """Where a statement begins, which may be its first decorator."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])


def tables(source: str) -> Iterator[symtable.SymbolTable]:
    waiting = [symtable.symtable(source, "cell", "exec")]
    while waiting:
        table = waiting.pop()
        yield table
        waiting += table.get_children()


@cache
def names_in(source: str) -> frozenset[str]:
    """All names from outside that the source of a function or class uses."""
    symbols = [symbol for table in tables(source) for symbol in table.get_symbols()]
    return frozenset(
        s.get_name()
        for s in symbols
        if s.is_global() and (s.is_referenced() or s.is_declared_global())
    )


INLINE = {"listcomp", "setcomp", "dictcomp", "genexpr", "lambda"}


@cache
def names_at_import(source: str) -> frozenset[str]:
    """The names from outside that a statement looks up when the file is imported."""
    top = symtable.symtable(source, "cell", "exec")
    found, waiting = set(), [top]
    while waiting:
        table = waiting.pop()
        symbols = [each for each in table.get_symbols() if each.is_referenced()]
        found |= {each.get_name() for each in symbols if table is top or each.is_global()}
        for inner in table.get_children():
            if inner.get_type() == "class" or inner.get_name() in INLINE:
                waiting.append(inner)
    return frozenset(found)


@cache
def called_at_import(source: str) -> frozenset[str]:
    """The names that a statement, or the decorators of a definition, may call then."""
    (node, *_) = ast.parse(source).body
    if not hasattr(node, "decorator_list"):
        return names_in(source)
    return frozenset().union(*(names_in(ast.unparse(each)) for each in node.decorator_list))


def locals_in(source: str) -> set[str]:
    """All names that mean something else inside of a function of the source."""
    return {
        symbol.get_name()
        for table in tables(source)
        if table.get_type() != "module"
        for symbol in table.get_symbols()
        if not (symbol.is_global() or symbol.is_free())
    }


def renamed(text: str, names: Mapping[str, str]) -> str:
    """The text with other names, also for `module.name`; NotKept where that is not safe."""
    names = {old: new for old, new in names.items() if old != new}
    own = {name.partition(".")[0] for name in {*names, *names.values()}}
    for name in own & locals_in(text) if names else ():
        raise NotKept(f"{name} has two meanings in yours and in the file: name yours anew")
    lines, spots = [line.encode() for line in text.split("\n")], set()
    for node in ast.walk(ast.parse(text)):
        at = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in names:
            spots.add((*at, ast.unparse(node)))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Global):
            line, own = lines[at[0] - 1], getattr(node, "names", None) or [node.name]
            for name in names.keys() & set(own):
                spot = re.compile(rb"\b%b\b" % name.encode()).search(line, at[1])
                spots.add((at[0], spot.start() if spot else 0, name))
    for number, at, old in sorted(spots, reverse=True):
        line, end = lines[number - 1], at + len(old.encode())
        if line[at:end] != old.encode():
            raise NotKept(f"{old} is taken in the file: give yours another name")
        lines[number - 1] = line[:at] + names[old].encode() + line[end:]
    return b"\n".join(lines).decode()
