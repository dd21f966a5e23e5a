"""Show the text of a worker as it is on disk, or take a copy into a cell, to be changed."""

import ast
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from textwrap import dedent
from types import FunctionType
from typing import Any

ROOT = Path(__file__).parents[3]


class Listing:
    """A fenced listing, and below it links to its files, as a notebook reaches them."""

    def __init__(self, text: str, files: Iterable[Path], language: str = "python") -> None:
        self.text, self.language = text, language
        known = dict.fromkeys(file for file in files if file.is_relative_to(ROOT))
        self.files = [file.relative_to(ROOT).as_posix() for file in known]

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        links = " · ".join(f"[{file}](../{file})" for file in self.files)
        page = f"```{self.language}\n{self.text}\n```" + (f"\n\n{links}" if links else "")
        return {"text/plain": self.text, "text/markdown": page}


def show_source(*functions: Callable, numbered: bool = False) -> Listing:
    """List functions, classes or methods; `numbered` shows the line numbers of the file."""
    texts = (source_of(function, numbered) for function in functions)
    return Listing("\n\n\n".join(texts), map(file_of, functions))


def edit(*functions: Callable) -> None:
    """Put a copy of workers, with the names of their files, into a new cell below this one.

    Change a line, run the cell, and launch the copy by its bare name: `launch(blocking, 2)`.
    It travels to the ranks by value; the file stays as it is. A helper to be changed is named
    too: `edit(worker, helper)`. Without a notebook the text is printed.
    """
    from IPython import get_ipython

    text = editable(*functions)
    if shell := get_ipython():
        shell.set_next_input(text)
    else:
        print(text)


def editable(*functions: Callable) -> str:
    """The cell that `edit` makes: all names of the files, then the sources."""
    functions = tuple(map(inspect.unwrap, functions))
    names = ", ".join(function.__name__ for function in functions)
    head = f"# A copy of {names}: change a line, run this cell, then launch it."
    files = dict.fromkeys(f.__module__ for f in functions if file_of(f).is_file())
    imports = [f"from {module} import *" for module in files]
    return "\n\n\n".join(["\n".join([head, *imports]), *map(source_of, functions)])


def namespace_of(thing: Callable) -> dict[str, Any]:
    """The names around a function or class, also in a file that was run but not imported."""
    if thing.__module__ in sys.modules:
        return vars(sys.modules[thing.__module__])
    parts = [inspect.unwrap(thing), *vars(thing).values()]
    parts = [getattr(part, "__func__", part) for part in parts]
    return next((p.__globals__ for p in parts if isinstance(p, FunctionType)), {})


def file_of(function: Callable) -> Path:
    """Where a function or class stands: a file, or a cell, where inspect finds no class."""
    is_class, around = isinstance(function, type), namespace_of(function)
    if is_class and around.get("__file__"):
        return Path(around["__file__"])
    if is_class:
        parts = [getattr(part, "__func__", part) for part in vars(function).values()]
        made = [part.__code__.co_filename for part in parts if isinstance(part, FunctionType)]
        return next(
            (file for file in map(Path, made) if _has(file, function)), _cell(function)
        )
    return Path(inspect.getsourcefile(inspect.unwrap(function)) or "")


def _has(file: Path, made: type) -> ast.AST | None:
    """The statement of a text that makes a class; a NamedTuple's methods are in another."""
    try:
        body = _body("".join(linecache.getlines(str(file))))
    except SyntaxError:  # the magic of a notebook
        return None
    own = made.__qualname__.partition(".")[0]
    return next((node for node in body if getattr(node, "name", "") == own), None)


@lru_cache(maxsize=32)
def _body(text: str) -> list[ast.stmt]:
    """The statements of a text; a reader's library is asked for each of its functions."""
    return ast.parse(text).body


def _cell(made: type) -> Path:
    """The last cell that makes this class, which has no functions and so no line."""
    found = (Path(name) for name in reversed(_cells()) if _makes(Path(name), made))
    return next(found, Path())


def _cells() -> list[str]:
    """The names of all cells that were run."""
    return [
        name for name, entry in linecache.cache.items() if len(entry) == 4 and not entry[1]
    ]


def cells() -> list[str]:
    """The texts of all cells that were run."""
    return ["".join(linecache.getlines(name)) for name in _cells()]


def _makes(file: Path, made: type) -> bool:
    """Whether a cell's text makes the same class, and not an earlier or later one."""
    node, around = _has(file, made), dict(namespace_of(made))
    try:
        exec(compile(ast.Module([node], []), str(file), "exec"), around)
        return _looks(around[made.__name__]) == _looks(made)
    except Exception:  # no statement, or one that needs what is no longer there
        return False


def _looks(made: type) -> tuple:
    """A class without the addresses of its parts."""
    parts = sorted(f"{name}: {value!r}" for name, value in vars(made).items())
    return made.__bases__, re.sub(r" at 0x[0-9a-f]+", "", "\n".join(parts))


def comments_above(function: Callable) -> list[str]:
    """The comments right above a function or class of a cell; a solution's mark is none."""
    file, text = file_of(function), source_of(function).split("\n")
    lines = [line.rstrip("\n") for line in linecache.getlines(str(file))]
    starts = [i for i in range(len(lines)) if lines[i : i + len(text)] == text]
    first = end = starts[-1] if starts else 0
    while first and lines[first - 1].startswith("#"):
        first -= 1
    return [line for line in lines[first:end] if not line.startswith(("# Solution (", "#%"))]


def source_of(function: Callable, numbered: bool = False) -> str:
    """The text of a function or class; a method comes without the indentation of its class.

    A file is read again: inspect would count lines in the text that was imported.
    """
    function = inspect.unwrap(function)
    file = file_of(function)
    if isinstance(function, FunctionType) and not file.is_file():  # a cell of this notebook
        return inspect.cleandoc("\n" + inspect.getsource(function))
    linecache.checkcache(str(file))
    text = "".join(linecache.getlines(str(file)))
    node, body = None, _body(text)
    for name in function.__qualname__.replace(".<locals>", "").split("."):
        node = next((part for part in body if getattr(part, "name", None) == name), None)
        body = getattr(node, "body", [])
    if not node:
        raise ValueError(f"{function.__qualname__} is no longer in {file.name}")
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    lines = dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno])).splitlines()
    width = len(str(first + len(lines)))
    if numbered:
        lines = [f"{i:{width}}  {line}" for i, line in enumerate(lines, first)]
    return "\n".join(lines)
