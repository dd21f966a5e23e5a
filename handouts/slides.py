"""Live slides: `make slides` writes build/slides/NN_stem.ipynb, to show with RISE.

Open one in JupyterLab and press Alt+R: a cell runs real ranks in front of the class. Beside
it stands NN_stem.html, the same slides for a browser alone, with the stored answers. One
rule makes them of a notebook. Its question stands on the first slide. A section begins with
what its cell says for the hall (`"handout": {"slide": …}`), and other prose is a note for the
speaker. A cell stands with what it showed; what answers a prediction comes when it is run.
"""

import ast
import base64
import copy
import re
import shutil
import tempfile
import zipfile
from itertools import groupby, pairwise
from pathlib import Path

import nbformat
from nbformat.v4 import new_markdown_cell, new_notebook

from handouts import convert
from handouts.answers import answers
from handouts.forms import HTML, MIMES, Book, Screen, div, figure, in_page, raw
from handouts.notebook import ROOT, Notebook, Piece, chosen, elements, read, stringify

LINES = 26  # of code and outputs, on one slide
PICTURE = 15  # lines that a picture takes
TALL = 22  # and one that is nearly as high as it is wide
SIZE = re.compile(r"<svg [^>]*width='([\d.]+)' height='([\d.]+)'")
HEADING = 5
CHECKED = "Many ranks must get what one process gets, and we do not take it for granted."
FILE = re.compile(
    r'<a href="(?!https?:|#|\.\./\d\d_)[^"]*"[^>]*>(.*?)</a>', re.S
)  # of the repository
TASK = re.compile(r"\*\*\d+\.\*\*")
RISE = {
    "start_slideshow_at": "beginning",
    "scroll": True,
    "center": False,
    "controls": False,
    "slideNumber": "c/t",
    "transition": "none",
}


class Deck:
    """Goes through the cells once; knows what stands on the slide so far."""

    def __init__(self, notebook: Notebook, media: Path) -> None:
        self.notebook, self.media = notebook, media
        self.stored = nbformat.read(notebook.path, as_version=4)
        self.cells: list[nbformat.NotebookNode] = []
        self.pieces: dict[str, list[Piece]] = {}  # of each code cell, by its id, with answers
        self.title, self.lines, self.asked = notebook.title, 0, False
        found = answers(notebook.pieces)
        self.cleared = {notebook.pieces[i].cell for each in found for i in each.shown}

    def made(self) -> nbformat.NotebookNode:
        cells = groupby(self.notebook.pieces, lambda piece: piece.cell)
        cells = [list(pieces) for _, pieces in cells]
        for pieces, coming in pairwise([*cells, []]):
            cell = self.stored.cells[pieces[0].cell]
            if cell.cell_type == "code":
                self._code(cell, pieces)
            else:
                self._markdown(pieces, coming)
        metadata = {**self.stored.metadata, "rise": RISE}
        return new_notebook(cells=self.cells, metadata=metadata)

    def _add(self, cell: nbformat.NotebookNode, kind: str, lines: int) -> None:
        cell.id = f"slide-{len(self.cells)}"
        if kind:
            cell.metadata["slideshow"] = {"slide_type": kind}
        if kind in ("slide", "subslide"):
            self.lines = 0
        self.lines += lines
        self.cells.append(cell)

    def _show(self, text: str, kind: str = "", lines: int = 0, **more: dict) -> None:
        self._add(new_markdown_cell(text, **more), kind, lines or 2 + len(text) // 80)

    def _note(self, text: str) -> None:
        last = self.cells[-1]
        if last.metadata.get("slideshow", {}).get("slide_type") == "notes":
            last.source += f"\n\n{text}"
        else:
            self._add(new_markdown_cell(text), "notes", 0)

    def _again(self, kind: str = "subslide") -> None:
        """A further slide of the section."""
        self._show(f"###### {self.title}", kind, 1)

    def _markdown(self, pieces: list[Piece], coming: list[Piece]) -> None:
        about = pieces[0].about
        role = coming[0].role if coming else ""
        headings = [p for p in pieces if p.kind == "heading"]
        section = next((p for p in headings if p.level == 2), (headings or [None])[0])
        if not headings and about.get("slide"):
            self._show(about["slide"])
        for piece in pieces:
            if piece.kind == "heading":
                self._heading(piece, about.get("slide", "") if piece is section else "")
            elif piece.kind == "navigation" or self.title == "Next":
                continue
            elif piece.kind == "predict" or (role == "finding" and piece is pieces[-1]):
                if self.lines + 4 + sum(map(_lines, coming)) > LINES:
                    self._again()
                self._show(f"> {piece.text}")
                self.asked = True
            elif self._belongs(piece):
                lines = 1 + int(1.4 * _rows(piece)) + len(piece.text) // 80
                if self.lines + lines > LINES and self.lines > HEADING:
                    self._again()
                self._show(piece.text, lines=lines)
            else:
                self._note(piece.text)
        if note := about.get("note"):
            self._note(f"*For the instructor.* {note}")

    def _belongs(self, piece: Piece) -> bool:
        """True for what the hall should read: tasks, tables, formulas, the summary."""
        if TASK.match(piece.text) and self.lines > HEADING:
            self._again()
        task = self.title == "Exercises" and not piece.text.startswith("<details>")
        kinds = {element["t"] for element in elements(piece.blocks)}
        shown = kinds & {"Table", "DisplayMath", "Image"}
        return bool(task or shown) or self.title == "Summary"

    def _heading(self, piece: Piece, said: str) -> None:
        self.title = piece.text
        if piece.level == 1:
            self._show(f"# {piece.text}\n\n## {self.notebook.question}", "slide")
        elif piece.text != "Next":
            kind = "slide" if piece.level == 2 else "subslide"
            said = said or (CHECKED if piece.text.startswith("Same answer") else "")
            self._show(f"{'#' * piece.level} {piece.text}\n\n{said}", kind, HEADING)

    def _code(self, stored: nbformat.NotebookNode, pieces: list[Piece]) -> None:
        cell, role, whole = copy.deepcopy(stored), pieces[0].role, pieces
        blocks = [block for piece in pieces for block in piece.blocks]
        steps = [element for element in elements(blocks) if element["t"] == "Figure"]
        cell.metadata.pop("jupyter", None)
        if role == "solution":
            cell.source = cell.source.partition("\n")[2]  # the first folds it in the lab
        if role or steps or pieces[0].cell in self.cleared:
            cell.outputs, cell.execution_count = [], None
            pieces = pieces[:1]
        if cell.source.startswith("edit(") or steps and _is_call(cell.source):
            self._add(cell, "skip", 0)
            self._steps(steps, self.asked)
            self.asked = False
            return
        if any(piece.kind == "listing" for piece in pieces):  # the call is of no interest
            self._listing([piece for piece in pieces if piece.kind == "listing"])
            return
        lines = sum(map(_lines, pieces)) + (TALL - PICTURE) * _is_tall(cell)
        if role == "solution" or self.lines + lines > LINES and self.lines > HEADING + 1:
            self._again()
        self._add(cell, "fragment" if self.asked else "", lines)
        self.pieces[cell.id] = whole
        self.asked = False
        self._steps(steps)

    def _steps(self, figures: list[dict], apart: bool = True) -> None:
        """What a slider moves through in the notebook; RISE has none, so a page a step."""
        for drawn in figures:
            image = next(e for e in elements(drawn) if e["t"] == "Image")
            if apart or self.lines > HEADING:
                self._again()
            name = image["c"][2][0]
            data = base64.b64encode((self.media / name).read_bytes()).decode()
            held = {name: {MIMES[Path(name).suffix]: data}}  # the file needs no other
            picture = f"![{stringify(image)}](attachment:{name})"
            self._show(picture, lines=LINES, attachments=held)

    def _listing(self, pieces: list[Piece]) -> None:
        """Whole functions, as many on a slide as have room."""
        for piece in pieces:
            language = (piece.blocks[0]["c"][0][1] or [""])[0]
            for part in (p for whole in piece.text.split("\n\n\n") for p in _fitting(whole)):
                lines = part.count("\n") + 2
                if self.lines + lines > LINES and self.lines > HEADING + 1:
                    self._again()
                self._show(f"```{language}\n{part.strip(chr(10))}\n```", lines=lines)


def _fitting(listing: str) -> list[str]:
    """A function, or the parts of one that is too long for a slide: it breaks at a method."""
    parts, rest = [], listing.strip("\n").split("\n")
    while len(rest) > LINES - 3:
        room = range(8, LINES - 3)
        ends = [i for i in room if re.match(r" +(def|@|class)\b", rest[i])]
        ends = ends or [i for i in room if not rest[i].strip()] or [LINES - 4]
        parts.append("\n".join(rest[: ends[-1]]).rstrip())
        rest = rest[ends[-1] :]
    return [*parts, "\n".join(rest)]


def _is_call(source: str) -> bool:
    """Whether a cell does nothing but show a film: its drawings are slides of their own."""
    (*others, last) = ast.parse(source).body
    return not others and isinstance(last, ast.Expr)


def _is_tall(cell: nbformat.NotebookNode) -> bool:
    shown = [str(output.get("data", {}).get("image/svg+xml", "")) for output in cell.outputs]
    sizes = [found for svg in shown if (found := SIZE.match(svg))]
    return any(float(size[2]) > 0.75 * float(size[1]) for size in sizes)


def _rows(piece: Piece) -> int:
    """The rows of the tables of a text."""
    return sum(line.startswith("|") for line in piece.text.splitlines())


def _lines(piece: Piece) -> int:
    """About the lines that a piece takes on a slide."""
    rows = sum(element["t"] == "CodeBlock" for element in elements(piece.blocks))
    if piece.kind == "image":
        return PICTURE
    if piece.kind == "html":
        return 2 + str(piece.blocks).count("'AlignDefault'") // 4 + 2 * rows
    return 1 + sum(1 + len(line) // 90 for line in piece.text.splitlines())


def write_one(notebook: Notebook, media: Path, target: Path) -> None:
    """Write the slides of one notebook: for RISE, in an archive with its style, as a page."""
    target.parent.mkdir(parents=True, exist_ok=True)
    style = shutil.copyfile(convert.ROOM / "rise.css", target.parent / "rise.css")
    deck = Deck(notebook, media)
    nbformat.write(deck.made(), target)
    with zipfile.ZipFile(target.with_suffix(".zip"), "w", zipfile.ZIP_DEFLATED) as archive:
        for file in (target, style):
            archive.write(file, file.name)
    target.with_suffix(".html").write_text(page(deck), encoding="utf-8")


def page(deck: Deck) -> str:
    """The slides as one web page, which runs nothing: an answer is what is stored."""
    form = Screen(HTML, deck.notebook.id, Path(), Book(ROOT, deck.media))
    slides: list[list[dict]] = []
    for cell in deck.cells:
        kind = cell.metadata.get("slideshow", {}).get("slide_type", "")
        if kind in ("slide", "subslide"):
            slides.append([])
        if kind == "skip":
            continue
        blocks, answer = [raw(cell.source, "markdown")], []
        if cell.cell_type == "code":
            code, *outputs = deck.pieces[cell.id]
            blocks = form.code("code", cell.source, False)
            answer = [block for piece in outputs for block in _output(piece, form)]
        elif cell.get("attachments"):
            blocks = [div("alone", blocks)]
        wrap = {"fragment": "fragment", "notes": "notes"}.get(kind)
        slides[-1] += [div(wrap, blocks)] if wrap else blocks
        if answer:
            slides[-1] += answer if cell.outputs else [div("fragment", answer)]
    words = {"heading": deck.notebook.headline}
    how = ("-t", "html5", "--mathml", "--template", convert.ROOM / "deck.html")
    made = convert.pandoc(
        [div("slide", slide) for slide in slides],
        *(*how, "--lua-filter", convert.ROOM / "deck.lua"),
        **words,
    )
    book = form.book
    made = re.sub(r'src="attachment:([^"]+)"', lambda m: f'src="{in_page(book, m[1])}"', made)
    made = re.sub(r'href="(\d\d_\w+)\.ipynb[^"]*"', r'href="../\1.html"', made)
    return FILE.sub(r"\1", made)


def _output(piece: Piece, form: Screen) -> list[dict]:
    """What a cell has shown, as blocks of a page; the steps of a film have slides."""
    if piece.kind in ("text", "error"):
        return form.code(piece.kind, piece.text, False)
    if piece.kind == "image":
        image = figure(piece.text, piece.alt, "")["c"][2]
        return form.made(image)
    if piece.kind == "html" and not any(e["t"] == "Figure" for e in elements(piece.blocks)):
        return [div("rich", form.made(piece.blocks))]
    return []


def write(out: Path, names: tuple = (), folder: Path = ROOT / "notebooks") -> list[str]:
    """Write the slides of the notebooks whose names begin so; returns a line for each."""
    paths = chosen(folder, names)
    with tempfile.TemporaryDirectory() as media:
        for path in paths:
            write_one(read(path, Path(media)), Path(media), out / path.name)
    return [f"{path.name}: open it in JupyterLab and press Alt+R" for path in paths]
