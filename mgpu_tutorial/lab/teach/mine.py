"""The reader's own library: a readable file beside the notebooks, in the order of the course.

Its imports stand at the top. Below a line that names the chapter stands what one build made;
a second pass replaces the first.
"""

import ast
import inspect
import linecache
import re
import symtable
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import NamedTuple

FILE = Path("mine.py")  # in the folder where a notebook's kernel works
HEAD = '"""What I have built, chapter by chapter."""'
BLOCK = re.compile(r"^# (\w+): (.+)\n", re.M)


class Piece(NamedTuple):
    """What one build keeps: the chapter, the names and their source."""

    chapter: str
    names: str
    source: str


def read() -> tuple[list[str], list[Piece]]:
    """The imports of the reader's library, and its pieces in their order."""
    if not FILE.is_file():
        return [], []
    top, *parts = BLOCK.split(FILE.read_text(encoding="utf-8"))
    imports = [line for line in top.splitlines() if re.match(r"(import|from) ", line)]
    blocks = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return imports, [Piece(chapter, names, text.strip()) for chapter, names, text in blocks]


def listing() -> str:
    """What is in the reader's library, by chapter."""
    imports, pieces = read()
    if not pieces:
        return f"No {FILE} here yet: what passes a build in a notebook goes there."
    wide = max(len(piece.chapter) for piece in pieces)
    return "\n".join(f"{piece.chapter:{wide}}  {piece.names}" for piece in pieces)


def library(*ours: Callable) -> SimpleNamespace:
    """Each of these functions and classes as the reader has built it, else as it is.

    Prints which is whose. What the reader has built travels to the ranks by value.
    """
    own = ModuleType("mine")
    if FILE.is_file():
        exec(
            compile(FILE.read_text(encoding="utf-8"), str(FILE.resolve()), "exec"), vars(own)
        )
    mine = [thing.__name__ for thing in ours if hasattr(own, thing.__name__)]
    rest = [thing.__name__ for thing in ours if thing.__name__ not in mine]
    print(f"{FILE.name}: {', '.join(mine) or '-'}; the package: {', '.join(rest) or '-'}")
    return SimpleNamespace(**{t.__name__: getattr(own, t.__name__, t) for t in ours})


def keep(chapter: str, functions: Sequence[Callable]) -> None:
    """Put functions and classes into the reader's library, with what they need."""
    imports, pieces = read()
    names = ", ".join(function.__name__ for function in functions)
    pieces = [piece for piece in pieces if piece.names != names]
    kept = {name for piece in pieces for name in piece.names.split(", ")}
    needed, sources = needs(functions, kept)
    own = [n for n, p in enumerate(pieces) if p.chapter == chapter]
    uses = (n for n in own if set(names.split(", ")) & _names(pieces[n].source))
    place = next(uses, len(pieces))  # a class is there before what is derived from it
    pieces.insert(place, Piece(chapter, names, "\n\n\n".join(sources)))
    order = [path.stem[3:] for path in sorted(FILE.resolve().parent.glob("[0-9]*_*.ipynb"))]
    order += [piece.chapter for piece in pieces]  # of notebooks that lie elsewhere
    pieces.sort(key=lambda piece: order.index(piece.chapter))
    built = re.compile(rf"from .* import ({'|'.join(kept | set(names.split(', ')))})")
    imports = [line for line in {*imports, *needed} if not built.fullmatch(line)]
    blocks = [f"# {piece.chapter}: {piece.names}\n{piece.source}" for piece in pieces]
    text = "\n\n\n".join(["\n".join([HEAD, "", *sorted(imports)]), *blocks])
    FILE.write_text(text + "\n", encoding="utf-8")


def needs(functions: Sequence[Callable], kept: set[str]) -> tuple[list[str], list[str]]:
    """The imports of functions, and their sources after those of their own helpers.

    A helper is what a cell made: a function, a class or a plain value.
    """
    imports, sources, waiting = [], [], list(functions)
    seen = kept | {function.__name__ for function in functions}
    while waiting:
        function = waiting.pop()
        sources.insert(0, source_of(function))
        around = vars(sys.modules[function.__module__])
        for name in sorted(names_in(function) & around.keys() - seen):
            thing = around[name]
            home = getattr(thing, "__module__", None)
            if isinstance(thing, ModuleType):
                as_name = "" if thing.__name__ == name else f" as {name}"
                imports.append(f"import {thing.__name__}{as_name}")
            elif home == function.__module__ and isinstance(thing, FunctionType | type):
                waiting.append(thing)
                seen.add(name)
            elif home and hasattr(thing, "__name__"):
                as_name = "" if thing.__name__ == name else f" as {name}"
                imports.append(f"from {home} import {thing.__name__}{as_name}")
            elif isinstance(thing, int | float | str):
                sources.insert(0, f"{name} = {thing!r}")
                seen.add(name)
    return imports, sources


def names_in(function: Callable) -> set[str]:
    """All names from outside that the source of a function or class uses."""
    return _names(source_of(function))


def _names(source: str) -> set[str]:
    tables = [symtable.symtable(source, "cell", "exec")]
    for table in tables:
        tables += table.get_children()
    symbols = [symbol for table in tables for symbol in table.get_symbols()]
    return {s.get_name() for s in symbols if s.is_referenced() and s.is_global()}


def source_of(function: Callable) -> str:
    """The source of a function or of a class, of a cell too, where inspect finds no class."""
    if not isinstance(function, type):
        return inspect.cleandoc("\n" + inspect.getsource(function))
    parts = (getattr(part, "__func__", part) for part in vars(function).values())  # static
    method = next(part for part in parts if isinstance(part, FunctionType))
    lines = linecache.getlines(inspect.unwrap(method).__code__.co_filename)
    body = ast.parse("".join(lines)).body
    node = next(part for part in body if getattr(part, "name", None) == function.__name__)
    first = min([node.lineno, *(line.lineno for line in node.decorator_list)])
    return "".join(lines[first - 1 : node.end_lineno]).rstrip()
