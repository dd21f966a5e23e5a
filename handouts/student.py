"""Notebooks whose predictions are still open: `make student` writes them to student/.

What the cells under a prediction showed is cleared, and the paragraph that explains it is
folded; everything else stays, and a link leads to the notebook with all its outputs. A
notebook that is there already is kept: it may hold somebody's work.
"""

import argparse
import copy
import sys
import tempfile
from itertools import groupby
from pathlib import Path

import nbformat

from handouts.answers import answers, without_lead
from handouts.notebook import ROOT, Notebook, Unprintable, read

FOLD = "<details><summary>Run the cell above, then open this</summary>\n\n{}\n\n</details>"
HEAD = (
    "*Student's copy: where you predict, the answer is cleared and its explanation folded. "
    "[The notebook with all outputs]({}) is one click away.*"
)


def student_copy(notebook: Notebook, stored: str) -> nbformat.NotebookNode:
    """The notebook with its predictions open; `stored` is the link to the one with outputs.

    Raises Unprintable where a paragraph to fold is not found in its cell.
    """
    made = copy.deepcopy(nbformat.read(notebook.path, as_version=4))
    for answer in answers(notebook.pieces):
        for i in answer.shown:
            cell = made.cells[notebook.pieces[i].cell]
            cell.outputs, cell.execution_count = [], None
        by_cell = groupby(answer.said, lambda i: notebook.pieces[i].cell)
        for number, paragraphs in by_cell:
            texts = [notebook.pieces[i].text for i in paragraphs]
            _fold(made.cells[number], texts, notebook.place(number))
    head = made.cells[0]
    title, _, rest = head.source.partition("\n")
    head.source = f"{title}\n\n{HEAD.format(stored)}\n{rest}"
    return made


def _fold(cell: nbformat.NotebookNode, texts: list[str], place: str) -> None:
    """Fold these paragraphs of a cell, all but a last sentence that leads on."""
    begin = cell.source.find(texts[0])
    last = cell.source.find(texts[-1], begin)
    if begin < 0 or last < 0:
        raise Unprintable(f"{place}: the paragraph to fold is not in the cell as it was read")
    end = last + len(texts[-1])
    said, lead = without_lead(texts[-1])
    folded = cell.source[begin:last] + said
    parts = [cell.source[:begin].rstrip(), FOLD.format(folded.strip()), lead.strip()]
    cell.source = "\n\n".join(filter(None, [*parts, cell.source[end:].strip()]))


def write(out: Path, folder: Path = ROOT / "notebooks", names: tuple = ()) -> list[Path]:
    """Write the students' notebooks that are not there yet; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    with tempfile.TemporaryDirectory() as media:
        for path in sorted(folder.glob("[0-9][0-9]_*.ipynb")):
            target = out / path.name
            if target.exists() or (names and not path.name.startswith(names)):
                continue
            made = student_copy(read(path, Path(media)), f"../notebooks/{path.name}")
            nbformat.write(made, target)
            written.append(target)
    return written


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="student", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="how the names of notebooks begin (all)")
    parser.add_argument("--out", type=Path, default=ROOT / "student", help="the folder")
    given = parser.parse_args(words)
    there = set(given.out.glob("*.ipynb"))
    try:
        written = write(given.out, names=tuple(given.names))
    except Unprintable as problem:
        print(problem, file=sys.stderr)
        return 1
    kept = f", {len(there)} kept as they were (delete one to have it anew)" if there else ""
    print(f"{len(written)} notebooks written to {given.out.name}/{kept}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
