"""Notebooks whose predictions are still open: `make lab` writes them to student/.

What the cells under a prediction showed is cleared, and the paragraph that explains it is
folded. A copy that is byte for byte what was written is renewed when its notebook changes;
any other is kept, because it holds somebody's work. The README beside them has the
repository's text, and its table leads to these copies.
"""

import hashlib
import json
import re
import tempfile
from itertools import groupby
from pathlib import Path

import nbformat

from handouts.answers import answers, lead_apart
from handouts.notebook import ROOT, Notebook, Piece, chosen, read

FOLD = "<details><summary>Run the cell above, then open this</summary>\n\n{}\n\n</details>"
HEAD = (
    "***Your copy:** where you predict, the answer is cleared and its explanation folded. "
    "[The notebook with all outputs]({}) is one click away. It is there to be read: what you "
    "build in it goes into another library than yours.*"
)
WRITTEN = ".written.json"  # in the folder: for each copy, what it was made of and its bytes
SOLVED = "docs/cell.svg"  # the README's picture of a build that is mended


def student_copy(notebook: Notebook, stored: str) -> nbformat.NotebookNode:
    """The notebook with open predictions; `stored` is the link to the one with outputs."""
    made = nbformat.read(notebook.path, as_version=4)
    for answer in answers(notebook.pieces):
        for i in answer.shown:
            cell = made.cells[notebook.pieces[i].cell]
            cell.outputs = []
        by_cell = groupby(answer.said, lambda i: notebook.pieces[i].cell)
        for number, paragraphs in by_cell:
            _fold(made.cells[number], [notebook.pieces[i] for i in paragraphs])
    for cell in made.cells:  # what ran with our functions is to run with the student's
        texts = [output.get("text", "") for output in cell.get("outputs", ())]
        if any(text.startswith("mine.py: ") for text in texts):
            cell.outputs = []
    for cell in [cell for cell in made.cells if cell.cell_type == "code"]:
        for part in (cell, *cell.outputs):  # in this copy nothing has run yet
            if "execution_count" in part:
                part.execution_count = None
    head = made.cells[0]
    title, _, rest = head.source.partition("\n")
    head.source = f"{title}\n\n{HEAD.format(stored)}\n{rest}"
    for cell in made.cells:
        cell.source = cell.source.replace("](../README.md", "](README.md")
    return made


def contents(readme: str) -> str:
    """The README as it reads from student/: notebooks are beside it, all else is above.

    The table of chapters comes first. The commands that were given go, and so does a picture
    that shows the solution of a build.
    """
    before, picture, after = readme.partition(f"]({SOLVED})\n\n")
    if picture:  # with the sentence below it
        readme = before.rpartition("![")[0] + after.partition("\n\n")[2]
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
    """Write the students' notebooks that nobody has changed; returns what was done."""
    out.mkdir(parents=True, exist_ok=True)
    readme = (ROOT / "README.md").read_text("utf-8")
    (out / "README.md").write_text(contents(readme), "utf-8")
    record = out / WRITTEN
    before = json.loads(record.read_text("utf-8")) if record.exists() else {}
    done, kept = [], []
    with tempfile.TemporaryDirectory() as media:
        for path in chosen(folder, names):
            copy, source = out / path.name, digest(path, Path(__file__))
            made_of, bytes_then = before.get(path.name, ("", ""))
            if not copy.exists():
                done.append(f"{path.name} is written")
            elif digest(copy) != bytes_then:
                kept.append(path.name)
                continue
            elif made_of != source:
                done.append(f"{path.name} is renewed: it was as we had written it")
            else:
                continue
            write_one(read(path, Path(media)), copy)
            before[path.name] = source, digest(copy)
            record.write_text(json.dumps(before, indent=1), "utf-8")
    if kept:
        done.append(f"kept, since changed: {', '.join(kept)} (delete one to have it anew)")
    return done


def digest(*paths: Path) -> str:
    """What tells files from others."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
