"""A folded solution is the package's text, and the cell to fill in has lines of it."""

import difflib
from pathlib import Path

import nbformat
import pytest

from tools.one_text import NOTEBOOKS, solutions

BOOKS = sorted(path.name for path in NOTEBOOKS.glob("[0-9]*.ipynb"))
OPEN = "challenges.solutions import"  # the solution of an open problem, which gives no start
MEND = "python -m tools.one_text {} writes the package's text into the folded cell"


@pytest.mark.parametrize("name", BOOKS)
def test_a_solution_is_the_package_s_text(name):
    for cell, text, due in solutions(NOTEBOOKS / name):
        lines = text.splitlines(), due.splitlines()
        apart = "\n".join(
            difflib.unified_diff(*lines, "the cell", "the package", lineterm="")
        )
        assert not apart, f"{name}, cell {cell}: {MEND.format(name)}\n{apart}"


def code_lines(source: str) -> list[str]:
    """Of a cell the lines of code that say something, without their indents."""
    lines = [line.strip() for line in source.splitlines()]
    kept = [line.partition("  #")[0] for line in lines if "..." not in line]
    other = "#", '"""', "build(", "from ", "import "
    return [line for line in kept if line and not line.startswith(other)]


@pytest.mark.parametrize("name", BOOKS)
def test_the_cell_to_fill_in_is_the_solution_with_lines_taken_out(name):
    cells = nbformat.read(Path(NOTEBOOKS / name), as_version=4).cells
    cells = [cell for cell in cells if cell.cell_type == "code"]
    for stub, solution in zip(cells, cells[1:], strict=False):
        is_stub = "exercise" in stub.metadata.get("tags", []) and "def " in stub.source
        if is_stub and OPEN not in solution.source:
            rest = iter(code_lines(solution.source))
            for line in code_lines(stub.source):
                assert any(line == other for other in rest), (
                    f"{name}, cell {stub.id}: not in its solution: {line}"
                )
