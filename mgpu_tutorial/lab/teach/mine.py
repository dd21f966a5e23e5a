"""The reader's own library: a readable file beside the notebooks, in the order of the course.

Below a line that names the chapter stands what one build made; a second pass replaces it.
"""

import re
import symtable
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import NamedTuple

from mgpu_tutorial.lab.teach.source import source_of

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
    text = FILE.read_text(encoding="utf-8") if FILE.is_file() else ""
    exec(compile(text, str(FILE.resolve()), "exec"), vars(own))
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
    uses = (n for n in own if set(names.split(", ")) & names_in(pieces[n].source))
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
        for name in sorted(names_in(sources[0]) & around.keys() - seen):
            thing = around[name]
            home = getattr(thing, "__module__", None)
            own = getattr(thing, "__name__", name)
            as_name = "" if own == name else f" as {name}"
            if isinstance(thing, ModuleType):
                imports.append(f"import {own}{as_name}")
            elif home == function.__module__ and isinstance(thing, FunctionType | type):
                waiting.append(thing)
                seen.add(name)
            elif home and hasattr(thing, "__name__"):
                imports.append(f"from {home} import {own}{as_name}")
            elif isinstance(thing, int | float | str):
                sources.insert(0, f"{name} = {thing!r}")
                seen.add(name)
    return imports, sources


def names_in(source: str) -> set[str]:
    """All names from outside that the source of a function or class uses."""
    tables = [symtable.symtable(source, "cell", "exec")]
    for table in tables:
        tables += table.get_children()
    symbols = [symbol for table in tables for symbol in table.get_symbols()]
    return {s.get_name() for s in symbols if s.is_referenced() and s.is_global()}
