"""The exercises of a chapter as an assignment: `make assignment NAME=point_to_point`.

Written to build/assignment/NAME/, from the cells tagged `exercise` and `solution`:

    otter/NAME.ipynb                    for `otter assign`
    nbgrader/source/NAME/NAME.ipynb     for `nbgrader generate_assignment`, with its config

Both hold the stub, the solution, and the check as a hidden test, worth the points of the
cell's metadata ("handout": {"points": 2}, else 1). What an exercise needs of the chapter is
copied in front of it: its first cell, and the statements that make the names that it uses.

VARIANT=2 asks the same with other numbers, in build/assignment/NAME_2/. An exercise's cell
holds them as a table: of each line the first entry stands in the notebook, the others take
its place, in the text, the stub, the solution and the check alike.

    "handout": {"variants": [["21", "15", "28"], ["7", "6", "8"]]}
"""

import argparse
import ast
import builtins
import re
import symtable
import sys
from collections.abc import Iterable, Iterator
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
Cell = nbformat.NotebookNode  # and a notebook
DEFINITIONS = ast.FunctionDef | ast.ClassDef
IMPORTS = ast.Import | ast.ImportFrom


@dataclass
class Exercise:
    """What a learner gets, what is right, and what decides; all as code but the words."""

    number: int
    words: list[Cell]  # what asks it, with the code that stands between
    given: str  # imports, and what both the stub and the solution start from
    stub: str
    solution: str
    test: str
    points: float
    needs: set[str]


def read(path: Path) -> Cell:
    return nbformat.read(path, as_version=4)


def exercises(notebook: Cell, variant: int = 1) -> tuple[str, list[Exercise]]:
    """The code that the exercises of a chapter build on, and the exercises.

    Raises ValueError where an exercise has no solution, or a table of variants does not fit.
    """
    cells, found = notebook.cells, []
    for cell in cells:
        cell.source = cell.source.removeprefix("%%solution (click to open)\n")
    begin = next(i for i, cell in enumerate(cells) if _is_heading(cell))
    words: list[Cell] = []
    for i, cell in enumerate(cells[begin:], begin):
        tags = cell.metadata.get("tags", [])
        if "solution" in tags:
            words = []
        elif "exercise" in tags:
            after = cells[i + 1] if i + 1 < len(cells) else cell
            if "solution" not in after.metadata.get("tags", []):
                raise ValueError(f"cell {i + 1}: an exercise without a solution")
            try:
                found.append(_exercise(len(found) + 1, words, cell, after, variant))
            except ValueError as problem:
                raise ValueError(f"cell {i + 1}: {problem}") from problem
        else:
            words.append(cell)
    wanted = set().union(*(each.needs for each in found))
    return _setup(cells[:begin], wanted), found


def variants_of(notebook: Cell) -> int:
    """How many variants a chapter's exercises have, the notebook's own among them.

    Raises ValueError where their tables do not have the same number of columns.
    """
    lines = [line for cell in notebook.cells for line in _table(cell)]
    counts = {len(line) for line in lines} or {1}
    if len(counts) > 1:
        raise ValueError(f"lines of {sorted(counts)} variants: all need the same number")
    return counts.pop()


def _is_heading(cell: Cell) -> bool:
    lines = cell.source.split("\n")
    return cell.cell_type == "markdown" and "## Exercises" in lines


def _table(cell: Cell) -> list[list[str]]:
    return cell.metadata.get("handout", {}).get("variants", [])


def _exercise(
    number: int, words: list[Cell], asked: Cell, solved: Cell, variant: int
) -> Exercise:
    answer = solved.metadata.get("handout", {}).get("answer", solved.source)
    sources = [*(cell.source for cell in words), asked.source, answer]
    *said, question, answer = _replaced(sources, _table(asked), variant)
    makers = {"markdown": _words, "code": new_code_cell}
    pairs = [(cell.cell_type, text) for cell, text in zip(words, said, strict=True)]
    code = [*(text for kind, text in pairs if kind == "code"), question, answer]
    own = set().union(*(_binds(node) for text in code for node in ast.parse(text).body))
    return Exercise(
        number,
        [makers[kind](text) for kind, text in pairs],
        *_parts(question, answer),
        asked.metadata.get("handout", {}).get("points", 1),
        set().union(*map(_reads, code)) - own,
    )


def _words(text: str) -> Cell:
    return new_markdown_cell(text.split("## Exercises")[-1].strip())


def _replaced(sources: list[str], table: list[list[str]], variant: int) -> list[str]:
    """The sources as a variant has them: all lines of its table at once, whole words only."""
    new = {line[0]: line[variant - 1] for line in table}
    if lost := [old for old in new if not any(map(_word(old).search, sources))]:
        raise ValueError(f"nothing to replace in the exercise: {lost}")
    if not new:
        return sources
    longest = sorted(new, key=len, reverse=True)
    every = re.compile("|".join(_word(piece).pattern for piece in longest))
    return [every.sub(lambda match: new[match[0]], source) for source in sources]


def _word(piece: str) -> re.Pattern:
    """The piece where it stands for itself: no 21 of 1.21, of 210 or of 21.5."""
    before = r"(?<![\w.,])" if re.match(r"\w", piece) else ""
    after = r"(?!\w|[.,]\d)" if re.search(r"\w$", piece) else ""
    return re.compile(f"{before}{re.escape(piece)}{after}")


def _parts(question: str, answer: str) -> tuple[str, str, str, str]:
    """Of an exercise's cell and its solution: what is given, stub, solution, test."""
    asked, solved = ast.parse(question).body, ast.parse(answer).body
    right = set().union(*map(_binds, asked)) & set().union(*map(_binds, solved))
    if not right:
        raise ValueError("the solution makes no name that the exercise asks for")
    solved = _needed(solved, right)
    used = set().union(*map(_reads, solved))
    mine = [n for n in asked if _binds(n) & right and not _is_check(n)]
    rest = [n for n in asked if n not in mine and not _is_check(n)]
    start = _needed(rest, used - right)
    given = [n for n in asked if isinstance(n, IMPORTS) or n in start]
    stub = [n for n in asked if n in given or n in mine]
    test = [n for n in asked if n not in stub]
    decides = re.sub(r"^check\(", "graded(", _joined(question, test), flags=re.MULTILINE)
    return (
        _joined(question, given),
        _joined(question, stub),
        _joined(answer, solved),
        decides,
    )


def _needed(statements: list[ast.stmt], names: set[str]) -> list[ast.stmt]:
    """Those statements, in order, that make these names, and what they need in turn."""
    kept: list[ast.stmt] = []
    for node in reversed(statements):
        if _binds(node) & names and not _is_check(node):
            kept.insert(0, node)
            names = names | _reads(node)
    return kept


def _is_check(node: ast.stmt) -> bool:
    call = getattr(node, "value", None)
    return isinstance(call, ast.Call) and getattr(call.func, "id", "") == "check"


def _joined(text: str, nodes: Iterable[ast.stmt]) -> str:
    """Statements with the room around them that ruff gives them."""
    said, last = "", None
    for node in nodes:
        wide = isinstance(node, DEFINITIONS) or isinstance(last, DEFINITIONS)
        after_imports = isinstance(last, IMPORTS) and not isinstance(node, IMPORTS)
        lines = 3 if wide else 2 if after_imports else 1
        said += "\n" * lines * (last is not None) + _source(text, node)
        last = node
    return said


def _source(text: str, node: ast.stmt) -> str:
    """The lines of a statement, its decorators and the comments above it."""
    lines = text.split("\n")
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
    while first and lines[first - 1].startswith("#") and "Solution (" not in lines[first - 1]:
        first -= 1
    return "\n".join(lines[first : node.end_lineno])


def _binds(node: ast.stmt) -> set[str]:
    """The names that a statement makes where it stands, not inside of functions."""
    symbols = symtable.symtable(ast.unparse(node), "cell", "exec").get_symbols()
    return {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}


def _reads(code: ast.stmt | str) -> set[str]:
    """The names from outside that a statement or a cell uses, in its functions too."""
    text = code if isinstance(code, str) else ast.unparse(code)
    tables, found = [symtable.symtable(text, "cell", "exec")], set()
    for table in tables:
        tables += table.get_children()
        at_top = table.get_type() == "module"
        used = (symbol for symbol in table.get_symbols() if symbol.is_referenced())
        found |= {symbol.get_name() for symbol in used if at_top or symbol.is_global()}
    return found - set(dir(builtins))


def _setup(cells: list[Cell], wanted: set[str]) -> str:
    """The chapter's first cell, and the statements that make these names."""
    fails = "raises-exception"
    code = [
        cell.source
        for cell in cells
        if cell.cell_type == "code" and fails not in cell.metadata.get("tags", [])
    ]
    body = [(text, node) for text in code[1:] for node in ast.parse(text).body]
    needed = _needed([node for _, node in body], wanted)
    kept = [_joined(text, [node]) for text, node in body if node in needed]
    return "\n\n".join([code[0], *kept])


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
        right = f"{each.given}\n{each.solution}".strip()
        solved = f"# BEGIN SOLUTION NO PROMPT\n{right}\n# END SOLUTION\n{prompt}"
        cells += [
            new_raw_cell(f"# BEGIN QUESTION\nname: q{each.number}\npoints: {each.points}"),
            *each.words,
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
        for i, cell in enumerate(each.words):
            if cell.cell_type == "code":
                cell.metadata.update(about(f"q{each.number}-given-{i}"))
        solved = f"{each.stub}\n### BEGIN SOLUTION\n{each.solution}\n### END SOLUTION"
        test = f"### BEGIN HIDDEN TESTS\n{each.test}\n### END HIDDEN TESTS"
        cells += [
            *each.words,
            new_code_cell(
                solved, metadata=about(f"q{each.number}", solution=True, locked=False)
            ),
            new_code_cell(
                test, metadata=about(f"q{each.number}-test", grade=True, points=each.points)
            ),
        ]
    return new_notebook(cells=cells, metadata={"kernelspec": KERNEL})


def write(path: Path, out: Path, variant: int = 1) -> Iterator[Path]:
    """Write both forms of the assignment of a chapter to `out`; yields their paths.

    Raises ValueError where there is no such variant.
    """
    notebook, name = read(path), path.stem[3:]
    title = notebook.cells[0].source.split("\n")[0].removeprefix("# ")
    last = variants_of(notebook)
    if not 1 <= variant <= last:
        raise ValueError(_no_such(variant, name, last))
    if variant > 1:
        name, title = f"{name}_{variant}", f"{title} (variant {variant})"
    for folder, made in (("otter", otter), ("nbgrader", nbgrader)):
        place = out / name / folder
        place = place if folder == "otter" else place / "source" / name
        place.mkdir(parents=True, exist_ok=True)
        nbformat.write(made(title, *exercises(notebook, variant)), place / f"{name}.ipynb")
        yield place / f"{name}.ipynb"
    (out / name / "nbgrader" / "nbgrader_config.py").write_text(CONFIG, encoding="utf-8")


def _no_such(variant: int | str, name: str, last: int) -> str:
    there = f"{name} has the variants 1 to {last}" if last > 1 else f"{name} has no variants"
    then = "give one of them" if last > 1 else "leave it out"
    return f"VARIANT={str(variant)!r}: {there}; {then}"


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", help="of a chapter, such as point_to_point")
    parser.add_argument("variant", nargs="?", default="1", help="1 is as in the notebook")
    given = parser.parse_args(words)
    paths = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    chapters = {path.stem[3:]: path for path in paths}
    try:
        if given.name not in chapters:
            there = ", ".join(chapters)
            raise ValueError(f"NAME={given.name!r}: no such chapter; there are {there}")
        path = chapters[given.name]
        if not re.fullmatch(r"\d+", given.variant, re.ASCII):
            last = variants_of(read(path))
            raise ValueError(_no_such(given.variant, given.name, last))
        for made in write(path, ROOT / "build" / "assignment", int(given.variant)):
            print(made.relative_to(ROOT))
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
