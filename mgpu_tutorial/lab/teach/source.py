"""Show the text of a worker as it is on disk, which is what the next launch runs."""

import ast
import inspect
from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path
from types import ModuleType


class Listing:
    """A fenced listing: highlighted in JupyterLab, stored with the notebook, printable."""

    def __init__(self, text: str, language: str = "python") -> None:
        self.text, self.language = text, language

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        fenced = f"```{self.language}\n{self.text}\n```"
        return {"text/plain": self.text, "text/markdown": fenced}


def show_source(*functions: Callable) -> Listing:
    """List the source of one or more functions or classes, docstrings included."""
    return Listing("\n\n\n".join(_source(function) for function in functions))


def show_changes(old: ModuleType, new: ModuleType) -> Listing:
    """List what differs between the files of two modules, a line that goes or comes each."""
    texts = [inspect.getsource(module).splitlines() for module in (old, new)]
    names = [Path(module.__file__ or "").name for module in (old, new)]
    return Listing("\n".join(unified_diff(*texts, *names, n=1, lineterm="")), "diff")


def _source(function: Callable) -> str:
    """Read the file again: inspect would count lines in the text that was imported."""
    function = inspect.unwrap(function)
    file = Path(inspect.getsourcefile(function) or "")
    if not file.exists():  # a cell of this notebook
        return inspect.getsource(function).rstrip()
    text = file.read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if getattr(node, "name", None) == function.__name__:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    raise ValueError(f"{function.__qualname__} is no longer in {file.name}")
