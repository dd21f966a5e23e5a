"""A folded solution is the package's text: `make notebooks` writes the one into the other.

    python -m tools.one_text [NOTEBOOK …]

In the notebook it stands without annotations and docstrings, but for the one sentence that
the reader's own cell has too, in lines of 79 columns.
"""

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import nbformat

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
Definition = ast.FunctionDef | ast.ClassDef


def ours_of(path: Path) -> dict[str, Callable]:
    """The functions and classes that a notebook's readers build, and those beside them."""
    package = f"mgpu_tutorial.{path.stem[3:]}"
    if not getattr(find_spec(package), "submodule_search_locations", None):
        return {}
    if not find_spec(f"{package}.builds"):
        return {}
    ours = import_module(f"{package}.builds").build.ours
    beside = {}
    for home in {thing.__module__ for thing in ours.values()}:
        for name, thing in vars(import_module(home)).items():
            if getattr(thing, "__module__", None) == home and inspect.unwrap(thing) is thing:
                beside[name] = thing
    return beside | ours


def in_a_cell(source: str, sentence: str | None) -> str:
    """The package's text of a function or class as it stands in a cell."""
    raw = source.encode()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def begin(node: ast.AST) -> int:
        return starts[node.lineno - 1] + node.col_offset

    def end(node: ast.AST) -> int:
        return starts[node.end_lineno - 1] + node.end_col_offset

    cuts = []  # from, to, and what stands there instead
    (top,) = ast.parse(source).body
    for node in ast.walk(top):
        if isinstance(node, ast.arg) and node.annotation:
            cuts.append((begin(node) + len(node.arg.encode()), end(node.annotation), b""))
        if isinstance(node, ast.AnnAssign):
            instead = b"" if node.value else b" = ..."
            cuts.append((end(node.target), end(node.annotation), instead))
        if isinstance(node, ast.FunctionDef) and node.returns:
            arrow = raw.rfind(b"->", 0, begin(node.returns))
            cuts.append((arrow, end(node.returns), b""))
        if isinstance(node, Definition) and ast.get_docstring(node) is not None:
            own = f'"""{sentence}"""'.encode() if sentence and node is top else b""
            last = end(node.body[0])
            if not own and len(node.body) == 1:
                own = b"pass"
            elif not own:
                last += len(raw[last:]) - len(raw[last:].lstrip())
            cuts.append((begin(node.body[0]), last, own))
    for first, last, instead in sorted(cuts, reverse=True):
        raw = raw[:first] + instead + raw[last:]
    lines = [line.rstrip() for line in raw.decode().splitlines()]
    tidy = ["ruff", "format", "--stdin-filename", str(NOTEBOOKS / "cell.py"), "-"]
    run = [sys.executable, "-m", *tidy]
    text = subprocess.run(run, input="\n".join(lines), capture_output=True, text=True)
    assert not text.returncode, text.stderr
    return text.stdout.rstrip("\n").replace('"""\n\n    def', '"""\n\n    def')


def with_ours(cell: str, ours: dict[str, Callable]) -> str:
    """A solution's cell in which each function that the package has is the package's."""
    lines = cell.splitlines()
    for node in reversed(ast.parse(cell).body):
        if isinstance(node, Definition) and node.name in ours:
            source = inspect.getsource(ours[node.name])
            text = in_a_cell(source, ast.get_docstring(node, clean=False))
            first = min([node, *node.decorator_list], key=lambda part: part.lineno)
            lines[first.lineno - 1 : node.end_lineno] = text.splitlines()
    return "\n".join(lines)


def solutions(path: Path) -> list[tuple[str, str, str]]:
    """Of each folded solution its cell's id, its text, and the text that it must have."""
    ours = ours_of(path)
    cells = nbformat.read(path, as_version=4).cells
    texts = [(c.id, c.source) for c in cells if "solution" in c.metadata.get("tags", [])]
    return [(name, text, with_ours(text, ours)) for name, text in texts]


def write(path: Path) -> list[str]:
    """Give a notebook's solutions the package's text; returns the ids of those changed."""
    changed = {name: due for name, text, due in solutions(path) if text != due}
    if changed:
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            cell.source = changed.get(cell.id, cell.source)
        nbformat.write(notebook, path)
    return list(changed)


if __name__ == "__main__":
    names = sys.argv[1:] or [path.name for path in NOTEBOOKS.glob("[0-9]*.ipynb")]
    for name in sorted(names):
        print(name, *write(NOTEBOOKS / Path(name).name))
