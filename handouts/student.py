"""Notebooks whose predictions are still open: `make lab` writes them to student/.

What the cells under a prediction showed is cleared, and the paragraph that explains it is
folded. A notebook that is there already is kept: it may hold somebody's work. The README
beside them has the repository's text, and its table leads to these copies.
"""

import re
import tempfile
from itertools import groupby
from pathlib import Path

import nbformat

from handouts.answers import answers, lead_apart
from handouts.notebook import ROOT, Notebook, Piece, chosen, read

FOLD = "<details><summary>Run the cell above, then open this</summary>\n\n{}\n\n</details>"
HEAD = (
    "*Student's copy: where you predict, the answer is cleared and its explanation folded. "
    "[The notebook with all outputs]({}) is one click away.*"
)


def student_copy(notebook: Notebook, stored: str) -> nbformat.NotebookNode:
    """The notebook with open predictions; `stored` is the link to the one with outputs."""
    made = nbformat.read(notebook.path, as_version=4)
    for answer in answers(notebook.pieces):
        for i in answer.shown:
            cell = made.cells[notebook.pieces[i].cell]
            cell.outputs, cell.execution_count = [], None
        by_cell = groupby(answer.said, lambda i: notebook.pieces[i].cell)
        for number, paragraphs in by_cell:
            _fold(made.cells[number], [notebook.pieces[i] for i in paragraphs])
    for cell in made.cells:  # what ran with our functions is to run with the student's
        texts = [output.get("text", "") for output in cell.get("outputs", ())]
        if any(text.startswith("mine.py: ") for text in texts):
            cell.outputs, cell.execution_count = [], None
    head = made.cells[0]
    title, _, rest = head.source.partition("\n")
    head.source = f"{title}\n\n{HEAD.format(stored)}\n{rest}"
    for cell in made.cells:
        cell.source = cell.source.replace("](../README.md", "](README.md")
    return made


def contents(readme: str) -> str:
    """The README as it reads from student/: notebooks are beside it, all else is above.

    The table of chapters comes first, and the commands that were given go.
    """
    head, *sections = re.split(r"^(?=## )", readme, flags=re.MULTILINE)
    chapters = [s for s in sections if "](notebooks/00_" in s]
    others = [
        s for s in sections if s not in chapters and not s.startswith("## Two commands")
    ]
    if chapters:
        title, opening, rest = head.split("\n\n", 2)
        readme = "\n\n".join([title, opening, "".join([*chapters, rest, *others])])
    here = re.sub(r"\]\(notebooks/(?=\d\d_)", "](", readme)
    return re.sub(r"\]\((?!\w+://|#|\d\d_)", "](../", here)


def _fold(cell: nbformat.NotebookNode, paragraphs: list[Piece]) -> None:
    """Fold these paragraphs of a cell, all but a last sentence that leads on."""
    source, last = cell.source, paragraphs[-1].text
    begin = source.index(paragraphs[0].text)
    end = source.index(last, begin) + len(last)
    _, lead = lead_apart(paragraphs[-1])
    middle = end - len(lead.text) if lead else end
    folded = FOLD.format(source[begin:middle].strip())
    parts = source[:begin], folded, source[middle:end], source[end:]
    cell.source = "\n\n".join(filter(None, (part.strip() for part in parts)))


def write_one(notebook: Notebook, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(student_copy(notebook, f"../notebooks/{target.name}"), target)


def write(out: Path, names: tuple = (), folder: Path = ROOT / "notebooks") -> list[str]:
    """Write the students' notebooks that are not there yet; returns what was done."""
    out.mkdir(parents=True, exist_ok=True)
    readme = (ROOT / "README.md").read_text("utf-8")
    (out / "README.md").write_text(contents(readme), "utf-8")
    paths = chosen(folder, names)
    new = [path for path in paths if not (out / path.name).exists()]
    with tempfile.TemporaryDirectory() as media:
        for path in new:
            write_one(read(path, Path(media)), out / path.name)
    kept = f"{len(paths) - len(new)} kept as they were (delete one to have it anew)"
    return [f"{path.name} is written" for path in new] + [kept] * (len(new) < len(paths))
