"""Show the text of a worker as it is on disk, which is what the next launch runs."""

import ast
import inspect
from collections.abc import Callable
from pathlib import Path


class Listing:
    """A fenced listing: highlighted in JupyterLab, stored with the notebook, printable."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/plain": self.text, "text/markdown": f"```python\n{self.text}\n```"}


def show_source(*functions: Callable) -> Listing:
    """List the source of one or more functions or classes, docstrings included."""
    return Listing("\n\n\n".join(_source(function) for function in functions))


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
