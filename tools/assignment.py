"""The exercises of a chapter as an assignment: `make assignment NAME=point_to_point`.

Written to build/assignment/NAME/, from the cells tagged `exercise` and `solution`, for
`otter assign` and for `nbgrader generate_assignment`. Both hold the cell of the exercise,
whose check tells the student how it stands, the solution, and the same check as a test, worth
the points of the cell's metadata ("handout": {"points": 2}, else 1). In front stand the
chapter's first cell and the statements that make the names that the exercises use.

VARIANT=2 asks the same with other numbers, in build/assignment/NAME_2/. An exercise's cell
holds them as a table, {"variants": [["21", "15", "28"], ["7", "6", "8"]]}: of each line the
first entry stands in the notebook, the others take its place, in all that the exercise has.
"""

import ast
import builtins
import re
import symtable
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_raw_cell

from mgpu_tutorial import CHAPTERS
from mgpu_tutorial.wrong_gradient import seeds
from tools.store import KERNEL

ROOT = Path(__file__).parent.parent
MARK = "# Solution (click to open)\n"
GRADER = """\
from mgpu_tutorial.lab.teach.checks import verdict


def graded(*answer, **more):
    said = verdict(*answer, **more)
    assert said.is_right, said"""
WHY = "**Why?** Say in two sentences why this is right, and what a wrong answer would do."
FIND = """\
**Find it.** One line of the numbered listings in section 2 of the chapter is replaced. The \
next cell shows what this does to the gradients. Name the function and the line, for \
example `["Copy.forward", 30]`."""
READ = "To be read by a person."
CONFIG = """\
c = get_config()  # noqa: F821
c.CourseDirectory.course_id = "mgpu_tutorial"
c.ClearSolutions.code_stub = {"python": "# change what stands above, or write it here"}
c.ClearSolutions.enforce_metadata = True
c.ExecutePreprocessor.timeout = 300
"""
NUMBER = re.compile(r"\*\*\d+\.\*\* ")
FINDING = re.compile(r"^judge\((\d+), finding\)", re.MULTILINE)  # of 25
Cell = nbformat.NotebookNode  # and a notebook


class Exercise(NamedTuple):
    """What a learner gets, what is right, and what decides; all as code but the words."""

    number: int
    words: list[Cell]  # what asks it, with the code that stands between
    stub: str
    solution: str
    test: str
    points: float
    needs: set[str]

    @property
    def graded(self) -> str:
        """A grader's test: it raises where the notebook's own only tells."""
        graded = re.sub(r"^check\(", "graded(", self.test, flags=re.MULTILINE)
        return re.sub(r"^(build|judge)\(", r"\1.require(", graded, flags=re.MULTILINE)


def exercises(notebook: Cell, variant: int = 1) -> tuple[str, list[Exercise]]:
    """The code that the exercises of a chapter build on, and the exercises."""
    cells, found, words = notebook.cells, [], []
    begin, end = (_place(cells, name) for name in ("## Exercises", "## Open problems"))
    for i, cell in enumerate(cells):
        tags = cell.metadata.get("tags", [])
        if "exercise" in tags:
            found.append(_exercise(len(found) + 1, words, *cells[i : i + 2], variant))
            words = []
        elif asked := FINDING.search(cell.source):
            found.append(_finding(len(found) + 1, cells[i - 1], cell, int(asked[1])))
            words = []
        elif cell.source.startswith("<details>"):
            continue  # the answer to a finding
        elif begin < i < end and "solution" not in tags:
            begins = NUMBER.match(cell.source)  # before it are questions without code
            words = [cell] if begins else [*words, cell]
        else:  # a build, or an open problem, is asked for by the words right before it
            words = [cell] if cell.cell_type == "markdown" else []
    code = [cell for cell in cells[:begin] if cell.cell_type == "code"]
    apart = {"raises-exception", "exercise", "solution"}
    fine = [cell for cell in code[1:] if not apart & {*cell.metadata.get("tags", [])}]
    body = [node for cell in fine for node in ast.parse(cell.source).body]
    kept = needed(body, set().union(*(each.needs for each in found)))
    return "\n\n".join([code[0].source, *map(ast.unparse, kept)]), found


def _place(cells: list[Cell], heading: str) -> int:
    """Where a heading stands; behind the last cell if it doesn't."""
    found = [i for i, cell in enumerate(cells) if heading in cell.source.split("\n")]
    return found[0] if found else len(cells)


def variants_of(notebook: Cell) -> int:
    """How many variants a chapter's exercises have, the notebook's own among them."""
    tables = [_noted(cell, "variants", []) for cell in notebook.cells]
    return max((len(line) for table in tables for line in table), default=1)


def _exercise(
    number: int, words: list[Cell], asked: Cell, solved: Cell, variant: int
) -> Exercise:
    answer = _noted(solved, "answer", solved.source.removeprefix(MARK))
    sources = [*(cell.source for cell in words), asked.source, answer]
    *said, question, answer = _replaced(sources, _noted(asked, "variants", []), variant)
    right = binds(ast.parse(question)) & binds(ast.parse(answer))
    if not right:
        raise ValueError(f"the solution of exercise {number} makes no name that it asks for")
    stub, test = _cut(question, right)
    made, code = [], [question, answer]
    for cell, text in zip(words, said, strict=True):
        if cell.cell_type == "code":
            made.append(new_code_cell(text))
            code.insert(-2, text)
        else:
            made.append(new_markdown_cell(text.split("## Exercises")[-1].strip()))
    whole = ast.parse("\n".join(code))
    needs, points = reads(whole) - binds(whole), _noted(asked, "points", 1)
    return Exercise(number, made, stub, _cut(answer, right)[0], test, points, needs)


def _finding(number: int, shown: Cell, asked: Cell, seed: int) -> Exercise:
    """A fault to be found by what a cell shows of it; the answer is a function and a line."""
    stub, test = _cut(asked.source, {"finding"})
    solution = f"finding = {seeds.answer(seed)!r}"
    whole = ast.parse("\n".join([shown.source, asked.source, solution]))
    words = [new_markdown_cell(FIND), new_code_cell(shown.source)]
    needs = reads(whole) - binds(whole)
    return Exercise(number, words, stub, solution, test, _noted(asked, "points", 1), needs)


def _noted(cell: Cell, name: str, otherwise: object) -> object:
    return cell.metadata.get("handout", {}).get(name, otherwise)


def _cut(text: str, names: set[str]) -> tuple[str, str]:
    """A cell up to the last statement that makes one of these names, and the rest of it."""
    end = max(node.end_lineno for node in ast.parse(text).body if binds(node) & names)
    lines = text.split("\n")
    return "\n".join(lines[:end]).strip(), "\n".join(lines[end:]).strip()


def _replaced(sources: list[str], table: list[list[str]], variant: int) -> list[str]:
    """The sources as a variant has them: all lines of its table at once, whole words only."""
    new = {line[0]: line[variant - 1] for line in table}
    if lost := [old for old in new if not any(re.search(_word(old), s) for s in sources)]:
        raise ValueError(f"nothing to replace in the exercise: {lost}")
    every = "|".join(_word(piece) for piece in sorted(new, key=len, reverse=True)) or r"(?!)"
    return [re.sub(every, lambda match: new[match[0]], source) for source in sources]


def _word(piece: str) -> str:
    """The piece where it stands for itself: no 21 of 1.21, of 210 or of 21.5."""
    before = r"(?<![\w.,])" if re.match(r"\w", piece) else ""
    after = r"(?!\w|[.,]\d)" if re.search(r"\w$", piece) else ""
    return f"{before}{re.escape(piece)}{after}"


def needed(statements: list[ast.stmt], names: set[str]) -> list[ast.stmt]:
    """Those statements, in order, that make these names, and what they need in turn."""
    kept: list[ast.stmt] = []
    for node in reversed(statements):
        if binds(node) & names:
            kept.insert(0, node)
            names = names | reads(node)
    return kept


def binds(node: ast.AST) -> set[str]:
    """The names that a piece of code makes where it stands, not inside of functions."""
    symbols = symtable.symtable(ast.unparse(node), "cell", "exec").get_symbols()
    return {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}


def reads(node: ast.AST) -> set[str]:
    """The names from outside that a piece of code uses, in its functions too."""
    tables, found = [symtable.symtable(ast.unparse(node), "cell", "exec")], set()
    for table in tables:
        tables += table.get_children()
        at_top = table.get_type() == "module"
        used = (symbol for symbol in table.get_symbols() if symbol.is_referenced())
        found |= {symbol.get_name() for symbol in used if at_top or symbol.is_global()}
    return found - set(dir(builtins))


def otter(title: str, setup: str, found: list[Exercise]) -> list[Cell]:
    """The cells of the master notebook that `otter assign` reads."""
    cells = [
        new_raw_cell("# ASSIGNMENT CONFIG\ninit_cell: true\nexport_cell: false\n"),
        new_markdown_cell(f"# {title}: the exercises"),
        *map(new_code_cell, (setup, GRADER)),
    ]
    for each in found:
        right = "\n\n\n".join([each.stub, each.solution, each.test])
        prompt = f'""" # BEGIN PROMPT\n{each.stub}\n\n\n{each.test}\n"""; # END PROMPT'
        solved = f"# BEGIN SOLUTION NO PROMPT\n{right}\n# END SOLUTION\n{prompt}"
        question, solution = f"# BEGIN QUESTION\nname: q{each.number}", "# BEGIN SOLUTION"
        parts = [f"{question}\npoints: {each.points}", *each.words, solution]
        parts += [new_code_cell(solved), "# END SOLUTION"]
        parts += ["# BEGIN TESTS", new_code_cell(each.graded), "# END TESTS"]
        parts += ["# END QUESTION", f"{question}_why\npoints: 1\nmanual: true"]
        parts += [new_markdown_cell(WHY), solution, new_markdown_cell(READ)]
        parts += ["# END SOLUTION", "# END QUESTION"]
        cells += [new_raw_cell(part) if isinstance(part, str) else part for part in parts]
    return cells


def nbgrader(title: str, setup: str, found: list[Exercise]) -> list[Cell]:
    """The cells of nbgrader's source notebook."""

    def code(source: str, name: str, **more: object) -> Cell:
        usual = {"grade": False, "solution": False, "locked": True, "task": False}
        ids = {"grade_id": name, "schema_version": 3}
        return new_code_cell(source, metadata={"nbgrader": usual | ids | more})

    cells = [new_markdown_cell(f"# {title}: the exercises")]
    cells.append(code(f"{setup}\n\n\n{GRADER}", "setup"))
    for each in found:
        name = f"q{each.number}"
        for i, cell in enumerate(each.words):
            is_code = cell.cell_type == "code"
            cells.append(code(cell.source, f"{name}-given-{i}") if is_code else cell)
        solved = f"{each.stub}\n### BEGIN SOLUTION\n{each.solution}\n### END SOLUTION"
        cells.append(code(f"{solved}\n\n\n{each.test}", name, solution=True, locked=False))
        cells.append(code(each.graded, f"{name}-test", grade=True, points=each.points))
        why = code("", f"{name}-why", grade=True, solution=True, locked=False, points=1)
        cells += [new_markdown_cell(WHY), new_markdown_cell(READ, metadata=why.metadata)]
    return cells


def write(path: Path, out: Path, variant: int = 1) -> Iterator[Path]:
    """Write both forms of the assignment of a chapter to `out`; yields their paths."""
    notebook, name = nbformat.read(path, 4), path.stem[3:]
    title = notebook.cells[0].source.split("\n")[0].removeprefix("# ")
    if variant > 1:
        name, title = f"{name}_{variant}", f"{title} (variant {variant})"
    for folder, form in (("otter", otter), (f"nbgrader/source/{name}", nbgrader)):
        cells = form(title, *exercises(notebook, variant))
        file = out / name / folder / f"{name}.ipynb"
        file.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": KERNEL}), file)
        yield file
    (out / name / "nbgrader" / "nbgrader_config.py").write_text(CONFIG, "utf-8")


def main(words: list[str]) -> int:
    name, variant = words
    try:
        if name not in CHAPTERS:
            there = ", ".join(CHAPTERS)
            raise ValueError(f"NAME={name!r}: no such chapter; there are {there}")
        (path,) = ROOT.glob(f"notebooks/[0-9][0-9]_{name}.ipynb")
        last = variants_of(nbformat.read(path, 4))
        if variant not in map(str, range(1, last + 1)):
            raise ValueError(f"VARIANT={variant!r}: {name} has the variants 1 to {last}")
        for made in write(path, ROOT / "build" / "assignment", int(variant)):
            print(made.relative_to(ROOT))
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
