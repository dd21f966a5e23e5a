"""Notebooks whose predictions are still open: `make lab` writes them to student/.

What the cells under a prediction showed is cleared, and the paragraph that explains it is
folded; everything else stays, and a link leads to the notebook with all its outputs. A
notebook that is there already is kept: it may hold somebody's work. The README beside them
has the repository's text, and its table leads to these copies.
"""

import copy
import re
import tempfile
from itertools import groupby
from pathlib import Path

import nbformat

from handouts.answers import answers, without_lead
from handouts.notebook import ROOT, Notebook, chosen, read

FOLD = "<details><summary>Run the cell above, then open this</summary>\n\n{}\n\n</details>"
HEAD = (
    "*Student's copy: where you predict, the answer is cleared and its explanation folded. "
    "[The notebook with all outputs]({}) is one click away.*"
)


def student_copy(notebook: Notebook, stored: str) -> nbformat.NotebookNode:
    """The notebook with open predictions; `stored` is the link to the one with outputs."""
    made = copy.deepcopy(nbformat.read(notebook.path, as_version=4))
    for answer in answers(notebook.pieces):
        for i in answer.shown:
            cell = made.cells[notebook.pieces[i].cell]
            cell.outputs, cell.execution_count = [], None
        by_cell = groupby(answer.said, lambda i: notebook.pieces[i].cell)
        for number, paragraphs in by_cell:
            texts = [notebook.pieces[i].text for i in paragraphs]
            _fold(made.cells[number], texts)
    head = made.cells[0]
    title, _, rest = head.source.partition("\n")
    head.source = f"{title}\n\n{HEAD.format(stored)}\n{rest}"
    for cell in made.cells:
        cell.source = cell.source.replace("](../README.md", "](README.md")
    return made


def contents(readme: str) -> str:
    """The README as it reads from student/: notebooks are beside it, all else is above."""
    here = re.sub(r"\]\(notebooks/(?=\d\d_)", "](", readme)
    return re.sub(r"\]\((?!\w+://|#|\d\d_)", "](../", here)


def _fold(cell: nbformat.NotebookNode, texts: list[str]) -> None:
    """Fold these paragraphs of a cell, all but a last sentence that leads on."""
    begin = cell.source.index(texts[0])
    last = cell.source.index(texts[-1], begin)
    end = last + len(texts[-1])
    said, lead = without_lead(texts[-1])
    folded = cell.source[begin:last] + said
    parts = [cell.source[:begin].rstrip(), FOLD.format(folded.strip()), lead.strip()]
    cell.source = "\n\n".join(filter(None, [*parts, cell.source[end:].strip()]))


def write(out: Path, names: tuple = (), folder: Path = ROOT / "notebooks") -> list[str]:
    """Write the students' notebooks that are not there yet; returns what was done."""
    out.mkdir(parents=True, exist_ok=True)
    readme = (ROOT / "README.md").read_text("utf-8")
    (out / "README.md").write_text(contents(readme), "utf-8")
    said, kept = [], 0
    with tempfile.TemporaryDirectory() as media:
        for path in chosen(folder, names):
            target = out / path.name
            if target.exists():
                kept += 1
                continue
            made = student_copy(read(path, Path(media)), f"../notebooks/{path.name}")
            nbformat.write(made, target)
            said.append(f"{path.name} is written")
    if kept:
        said.append(f"{kept} kept as they were (delete one to have it anew)")
    return said
