"""The exercises of a chapter as an assignment: `make assignment NAME=point_to_point`.

Written to build/assignment/NAME/, from the cells tagged `exercise` and `solution`:

    otter/NAME.ipynb                    for `otter assign`
    nbgrader/source/NAME/NAME.ipynb     for `nbgrader generate_assignment`, with its config

Both hold the stub, the solution, and the check as a hidden test, worth the points of the
cell's metadata ("handout": {"points": 2}, else 1). What an exercise needs of the chapter is
copied in front of it: the imports, and the cells that make the names that it uses.
"""

import argparse
import ast
import builtins
import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_raw_cell

ROOT = Path(__file__).parent.parent
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
GRADER = """\
from mgpu_tutorial.lab.teach.checks import verdict


def graded(*answer, **more):
    said = verdict(*answer, **more)
    assert said.is_right, said"""
CONFIG = """\
c = get_config()  # noqa: F821
c.CourseDirectory.course_id = "mgpu_tutorial"
c.ClearSolutions.code_stub = {"python": "# change what stands above, or write it here"}
c.ClearSolutions.enforce_metadata = True
c.ExecutePreprocessor.timeout = 300
"""


@dataclass
class Exercise:
    """What a learner gets, what is right, and what decides; all as code."""

    number: int
    text: str
    stub: str
    solution: str
    test: str
    points: float
    needs: set[str]


def exercises(notebook: nbformat.NotebookNode) -> tuple[str, list[Exercise]]:
    """The code that the exercises of a chapter build on, and the exercises.

    Raises ValueError where an exercise has no solution.
    """
    cells, found, text = notebook.cells, [], ""
    for i, cell in enumerate(cells):
        if cell.cell_type == "markdown":
            text = cell.source
        elif "exercise" in cell.metadata.get("tags", []):
            later = [c for c in cells[i + 1 :] if "solution" in c.metadata.get("tags", [])]
            if not later:
                raise ValueError(f"cell {i + 1}: an exercise without a solution")
            points = cell.metadata.get("handout", {}).get("points", 1)
            words = text.split("## Exercises")[-1].strip()
            found.append(
                _exercise(len(found) + 1, words, cell.source, later[0].source, points)
            )
    wanted = set().union(*(each.needs for each in found))
    return _setup(cells, wanted), found


def _exercise(number: int, text: str, asked: str, solved: str, points: float) -> Exercise:
    answer = [node for node in ast.parse(solved).body if not _is_check(node)]
    right = set().union(*map(_made, answer))
    stub, test = [], []
    for node in ast.parse(asked).body:
        imports = isinstance(node, ast.Import | ast.ImportFrom)
        mine = imports or (_made(node) & right and not _is_check(node))
        (stub if mine else test).append(node)
    decides = "\n".join(_source(asked, node) for node in test).replace("check(", "graded(", 1)
    solution = "\n".join(_source(solved, node) for node in answer)
    imports = [n for n in stub if isinstance(n, ast.Import | ast.ImportFrom)]
    solution = "\n".join([*(_source(asked, n) for n in imports), solution])
    stub_text = "\n".join(_source(asked, node) for node in stub)
    needs = _used(asked) | _used(solved)
    return Exercise(number, text, stub_text, solution, decides, points, needs)


def _is_check(node: ast.stmt) -> bool:
    call = getattr(node, "value", None)
    return isinstance(call, ast.Call) and getattr(call.func, "id", "") == "check"


def _source(text: str, node: ast.stmt) -> str:
    """The lines of a statement, its decorators and the comments above it."""
    lines = text.split("\n")
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
    while first and lines[first - 1].startswith("#") and "Solution (" not in lines[first - 1]:
        first -= 1
    return "\n".join(lines[first : node.end_lineno])


def _made(node: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return {
        n.id
        for n in ast.walk(node)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def _used(text: str) -> set[str]:
    """The names that a cell reads; those that it binds itself are among them, if both."""
    names = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)]
    read = {n.id for n in names if isinstance(n.ctx, ast.Load)}
    return read - set(dir(builtins))


def _setup(cells: list, wanted: set[str]) -> str:
    """The cells of the chapter that make these names, and what those need, in order."""
    kept: list[str] = []
    for cell in reversed(cells):
        tags = cell.metadata.get("tags", [])
        if cell.cell_type != "code" or {"exercise", "solution"} & set(tags):
            continue
        made = set().union(*map(_made, ast.parse(cell.source).body), set())
        if made & wanted and "raises-exception" not in tags:
            wanted |= _used(cell.source)
            kept.insert(0, cell.source)
    return "\n\n".join(kept)


def otter(title: str, setup: str, found: list[Exercise]) -> nbformat.NotebookNode:
    """The master notebook that `otter assign` reads."""
    cells = [
        new_raw_cell("# ASSIGNMENT CONFIG\ninit_cell: true\nexport_cell: false\n"),
        new_markdown_cell(f"# {title}: the exercises"),
        new_code_cell(setup),
        new_code_cell(GRADER),
    ]
    for each in found:
        prompt = f'""" # BEGIN PROMPT\n{each.stub}\n"""; # END PROMPT'
        solved = f"# BEGIN SOLUTION NO PROMPT\n{each.solution}\n# END SOLUTION\n{prompt}"
        cells += [
            new_raw_cell(f"# BEGIN QUESTION\nname: q{each.number}\npoints: {each.points}"),
            new_markdown_cell(each.text),
            new_raw_cell("# BEGIN SOLUTION"),
            new_code_cell(solved),
            new_raw_cell("# END SOLUTION"),
            new_raw_cell("# BEGIN TESTS"),
            new_code_cell(f"# HIDDEN\n{each.test}"),
            new_raw_cell("# END TESTS"),
            new_raw_cell("# END QUESTION"),
        ]
    return new_notebook(cells=cells, metadata={"kernelspec": KERNEL})


def nbgrader(title: str, setup: str, found: list[Exercise]) -> nbformat.NotebookNode:
    """The source notebook of nbgrader."""

    def about(name: str, **more: object) -> dict:
        given = {"grade": False, "solution": False, "locked": True, "task": False}
        return {"nbgrader": {**given, "grade_id": name, "schema_version": 3, **more}}

    cells = [
        new_markdown_cell(f"# {title}: the exercises"),
        new_code_cell(f"{setup}\n\n\n{GRADER}", metadata=about("setup")),
    ]
    for each in found:
        solved = f"{each.stub}\n### BEGIN SOLUTION\n{each.solution}\n### END SOLUTION"
        test = f"### BEGIN HIDDEN TESTS\n{each.test}\n### END HIDDEN TESTS"
        cells += [
            new_markdown_cell(each.text),
            new_code_cell(
                solved, metadata=about(f"q{each.number}", solution=True, locked=False)
            ),
            new_code_cell(
                test, metadata=about(f"q{each.number}-test", grade=True, points=each.points)
            ),
        ]
    return new_notebook(cells=cells, metadata={"kernelspec": KERNEL})


def write(path: Path, out: Path) -> Iterator[Path]:
    """Write both forms of the assignment of a chapter; yields their paths."""
    notebook, name = nbformat.read(path, as_version=4), path.stem[3:]
    title = notebook.cells[0].source.split("\n")[0].removeprefix("# ")
    setup, found = exercises(notebook)
    for folder, made in (("otter", otter), ("nbgrader", nbgrader)):
        place = out / folder if folder == "otter" else out / folder / "source" / name
        place.mkdir(parents=True, exist_ok=True)
        nbformat.write(made(title, setup, copy.deepcopy(found)), place / f"{name}.ipynb")
        yield place / f"{name}.ipynb"
    (out / "nbgrader" / "nbgrader_config.py").write_text(CONFIG, encoding="utf-8")


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", help="of a chapter, such as point_to_point")
    name = parser.parse_args(words).name
    paths = list((ROOT / "notebooks").glob(f"[0-9][0-9]_{name}.ipynb"))
    if not name or not paths:
        print(f"NAME={name!r}: no such chapter", file=sys.stderr)
        return 2
    for path in write(paths[0], ROOT / "build" / "assignment" / name):
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
