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
import struct
import tempfile
import zipfile
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path

import nbformat
from nbformat.v4 import new_markdown_cell, new_notebook

from handouts import convert
from handouts.answers import answers
from handouts.forms import FLEX, HTML, MIMES, Book, Screen, div, figure, in_page, raw
from handouts.notebook import ROOT, Notebook, Piece, chosen, elements, read, stringify

# Heights are in pixels of a slide of 1600 x 900, where a page sets its text: deck.html.
WIDE, HIGH = 1472, 800
SMALLER = 1.15  # what is higher is still shown, that much smaller
LINE, TEXT, SMALL = 26, 40, 41  # of code, of prose, and the title of a further slide
HEADING = 115
LETTER = 12.5  # the width of one, in code; a letter of prose is a little wider
LINES = (HIGH - SMALL) // LINE - 2  # of code, on one slide
ROWS = 12  # of a table that is cut
WHOLE = int(LINES * 1.25)  # a function up to here is not cut
SIZE = re.compile(rb"<svg [^>]*width=['\"]([\d.]+)[^>]*height=['\"]([\d.]+)")
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
        self.before: dict[str, float] = {}  # what stands on its slide above it
        self.imports = ""  # the cell that only imports: no slide of a page
        self.title, self.used, self.asked = notebook.title, 0.0, False
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
        self._say()
        metadata = {**self.stored.metadata, "rise": RISE}
        return new_notebook(cells=self.cells, metadata=metadata)

    def _say(self) -> None:
        """A slide that would hold a heading alone has the first sentence of its note."""
        for cell, coming in pairwise(self.cells):
            bare = _kind(cell) in ("slide", "subslide") and "\n\n" not in cell.source.strip()
            first = re.match(r"(?![|<~>-])[^\n]+?[.!?](?=\s|$)", coming.source)
            if bare and cell.source.startswith("##") and _kind(coming) == "notes" and first:
                cell.source = f"{cell.source.strip()}\n\n{first[0]}"

    def _add(self, cell: nbformat.NotebookNode, kind: str, height: float) -> None:
        cell.id = f"slide-{len(self.cells)}"
        if kind:
            cell.metadata["slideshow"] = {"slide_type": kind}
        if kind in ("slide", "subslide"):
            self.used = 0
        self.before[cell.id] = self.used
        self.used += height
        self.cells.append(cell)

    def _show(self, text: str, kind: str = "", height: float = 0, **more: dict) -> None:
        self._add(new_markdown_cell(text, **more), kind, height or _prose(len(text)))

    def _note(self, text: str, **more: dict) -> None:
        last = self.cells[-1]
        if _kind(last) == "notes" and not more:
            last.source += f"\n\n{text}"
        else:
            self._add(new_markdown_cell(text, **more), "notes", 0)

    def _again(self, more: str = "", height: float = SMALL) -> None:
        """A further slide of the section."""
        self._show(f"###### {self.title}{more}", "subslide", height)

    def _makes_room(self, height: float) -> None:
        """A further slide, where this one holds more than a title and has no room for it.

        One that would stay half empty, or be followed by a line or two, is rather smaller.
        """
        little = self.used < 0.4 * HIGH or height < 0.2 * HIGH
        if self.used > HEADING and self.used + height > HIGH * (SMALLER if little else 1):
            self._again()

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
                asked = _prose(len(piece.text)) + TEXT
                self._makes_room(asked + sum(self.height(p) for p in coming))
                self._show(f"> {piece.text}", height=asked)
                self.asked = True
            elif self._belongs(piece):
                self._makes_room(self.height(piece))
                self._show(piece.text, height=self.height(piece))
            else:
                self._note(piece.text)
        if note := about.get("note"):
            self._note(f"*For the instructor.* {note}")

    def _belongs(self, piece: Piece) -> bool:
        """True for what the hall should read: tasks, tables, formulas, the summary."""
        if TASK.match(piece.text) and self.used > HEADING:
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
            height = HEADING + (_prose(len(said)) if said else 0)
            self._show(f"{'#' * piece.level} {piece.text}\n\n{said}", kind, height)

    def _code(self, stored: nbformat.NotebookNode, pieces: list[Piece]) -> None:
        cell, role = copy.deepcopy(stored), pieces[0].role
        blocks = [block for piece in pieces for block in piece.blocks]
        steps = [element for element in elements(blocks) if element["t"] == "Figure"]
        cell.metadata.pop("jupyter", None)
        if role == "solution":
            cell.source = cell.source.partition("\n")[2]  # the first folds it in the lab
        if role or steps or pieces[0].cell in self.cleared:
            cell.outputs, cell.execution_count = [], None
        if cell.source.startswith("edit(") or steps and _is_call(cell.source):
            self._add(cell, "skip", 0)
            self._steps(steps, self.asked)
            self.asked = False
            return
        if any(piece.kind == "listing" for piece in pieces):  # the call is of no interest
            self._listing([piece for piece in pieces if piece.kind == "listing"])
            return
        kind = "fragment" if self.asked else ""
        if not self.pieces:  # the first of all is not on the title
            imports = _only_imports(cell.source)
            self._again(": run this first" if imports else "")
            self.imports = f"slide-{len(self.cells)}" if imports else ""
        elif role == "solution":  # the hall has a moment before it is shown
            self._again(" \u00b7 solution")
            kind = "fragment"
        else:
            self._makes_room(sum(map(self.height, pieces)))
        self._add(cell, kind, sum(map(self.height, pieces)))
        self.pieces[cell.id] = pieces
        self.asked = False
        if pieces[0].cell in self.cleared and not role:
            self._stored(pieces[1:])
        if self.imports == cell.id:
            self.used = HIGH
        self._steps(steps)

    def _stored(self, outputs: list[Piece]) -> None:
        """The answer for the speaker, in case a cell fails in front of the hall."""
        said = ["*What the stored run showed:*"]
        held = {}
        for piece in outputs:
            if piece.kind in ("text", "error"):
                said.append(f"~~~text\n{piece.text}\n~~~")
            elif piece.kind == "image":
                held |= self._held(piece.text)
                said.append(f"![{piece.alt}](attachment:{piece.text})")
            elif _is_rich(piece):
                said.append(piece.text)
        if len(said) > 1:
            more = {"attachments": held} if held else {}
            self._note("\n\n".join(said), metadata={"stored": True}, **more)

    def _held(self, name: str) -> dict:
        """A picture for a cell, which then needs no other file."""
        data = base64.b64encode((self.media / name).read_bytes()).decode()
        return {name: {MIMES[Path(name).suffix]: data}}

    def _steps(self, figures: list[dict], apart: bool = True) -> None:
        """What a slider moves through in the notebook; RISE has none, so a page a step."""
        for drawn in figures:
            image = next(e for e in elements(drawn) if e["t"] == "Image")
            if apart or self.used > HEADING:
                self._again()
            name = image["c"][2][0]
            picture = f"![{stringify(image)}](attachment:{name})"
            self._show(picture, height=HIGH, attachments=self._held(name))

    def _listing(self, pieces: list[Piece]) -> None:
        """Whole functions, as many on a slide as have room."""
        for piece in pieces:
            language = (piece.blocks[0]["c"][0][1] or [""])[0]
            for whole in piece.text.split("\n\n\n"):
                name = re.match(r"(?:@.*\n)*(?:class|def) (\w+)", whole)
                for i, part in enumerate(_fitting(whole)):
                    height = _of_code(part)
                    if i and name:
                        self._again(f" \u00b7 {name[1]}, continued")
                    else:
                        self._makes_room(height)
                    text = part.strip(chr(10))
                    self._show(f"```{language}\n{text}\n```", height=height)

    def height(self, piece: Piece) -> float:
        """About what a piece takes on a slide."""
        if piece.kind in ("code", "listing", "error"):
            return _of_code(piece.text)
        if piece.kind == "text":
            return _of_code(own) if (own := _spoken(piece.text)) else 0
        if piece.kind == "image":
            return self._picture(piece.text)
        if piece.kind in ("hint", "asked") or piece.kind == "html" and not _is_rich(piece):
            return 0
        return self.of_blocks(piece.blocks)

    def _picture(self, name: str) -> float:
        """A picture is 1120 wide, or 594 high."""
        data = (self.media / name).read_bytes()
        if found := SIZE.search(data):
            width, height = map(float, found.groups())
        elif data.startswith(b"\x89PNG"):
            width, height = struct.unpack(">II", data[16:24])
        else:
            return 594
        return min(594, 1120 * height / width)

    def of_blocks(self, blocks: list, width: float = WIDE) -> float:
        return sum(self._of_block(block, width) for block in blocks)

    def _of_block(self, block: dict, width: float) -> float:
        kind, content = block["t"], block.get("c")
        if kind in ("Para", "Plain"):
            images = [inline for inline in content if inline["t"] == "Image"]
            if images:
                return sum(self._picture(image["c"][2][0]) for image in images)
            return _prose(len(stringify(content)), width) - (kind == "Plain") * 29
        if kind == "CodeBlock":
            return _of_code(content[1], width)
        if kind == "Table":
            rows = (TEXT * (1 + len(row) * LETTER // width) for row in _rows(content))
            return 30 + sum(rows)
        if kind in ("BulletList", "OrderedList"):
            items = content if kind == "BulletList" else content[1]
            return 29 + sum(self.of_blocks(item, width - 50) for item in items)
        if kind == "Header":
            return HEADING
        if kind == "BlockQuote":
            return 40 + self.of_blocks(content, width - 60)
        if kind == "Div":
            style, inner = dict(content[0][2]).get("style", ""), content[1]
            if not FLEX.search(style):
                return self.of_blocks(inner, width)
            across = min(len(inner), 6)  # a panel a rank
            parts = [self._of_block(panel, width / across - 40) - 60 for panel in inner]
            return sum(max(parts[i : i + across]) for i in range(0, len(parts), across))
        return 0


def _kind(cell: nbformat.NotebookNode) -> str:
    return cell.metadata.get("slideshow", {}).get("slide_type", "")


def _prose(letters: int, width: float = WIDE) -> float:
    return 29 + TEXT * (1 + letters * 14.5 // width)


def _of_code(text: str, width: float = WIDE) -> float:
    rows = (1 + len(line) * LETTER // width for line in text.strip("\n").split("\n"))
    return 30 + LINE * sum(rows)


def _rows(table: list) -> Iterator[str]:
    """The words of each row."""
    _, _, _, head, bodies, _ = table
    for row in (*head[1], *(row for body in bodies for row in (*body[2], *body[3]))):
        yield stringify(row[1])


def _spoken(text: str) -> str:
    """An output without what it says of the reader's own library."""
    lines = text.split("\n")
    return "\n".join(line for line in lines if not line.startswith("mine.py: "))


def _only_imports(source: str) -> bool:
    kinds = (ast.Import, ast.ImportFrom)
    return all(isinstance(statement, kinds) for statement in ast.parse(source).body)


def _fitting(listing: str) -> list[str]:
    """A function, or the parts of one that is too long for a slide even if it is smaller.

    It is cut before a statement, the less deep the better, and never behind a line that
    opens a block.
    """
    rest = listing.strip("\n").split("\n")
    cuts = dict(_cuts(rest))  # with their depth
    parts, begin = [], 0
    while len(rest) - begin > WHOLE:
        ends = {i - begin: depth for i, depth in cuts.items() if 8 <= i - begin <= LINES}
        end = min(ends, key=lambda i: (ends[i], -i), default=LINES)
        parts.append("\n".join(rest[begin : begin + end]).rstrip())
        begin += end
    return [*parts, "\n".join(rest[begin:])]


def _cuts(lines: list[str]) -> Iterator[tuple[int, int]]:
    """The lines before which a listing may be cut, and how deep they stand."""
    try:
        tree = ast.parse("\n".join(lines))
    except SyntaxError:  # not Python
        yield from ((i + 1, 0) for i, line in enumerate(lines) if not line.strip())
        return
    for node in ast.walk(tree):
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            for statement in body[1:] if isinstance(body, list) else ():
                first = [d.lineno for d in getattr(statement, "decorator_list", ())]
                line = min([statement.lineno, *first]) - 1
                while lines[line - 1].lstrip().startswith("#"):
                    line -= 1  # with the comment above it
                yield line, statement.col_offset


def _is_call(source: str) -> bool:
    """Whether a cell does nothing but show a film: its drawings are slides of their own."""
    (*others, last) = ast.parse(source).body
    return not others and isinstance(last, ast.Expr)


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
    joined = False
    for cell in deck.cells:
        kind = _kind(cell)
        if kind == "subslide" and joined:  # a film begins under its call
            joined = False
            continue
        if kind in ("slide", "subslide"):
            slides.append([])
            title = cell.source.partition("\n")[0].lstrip("# ")
        if kind == "skip" or cell.metadata.get("stored"):
            continue
        blocks = [raw(cell.source, "markdown")]
        if cell.cell_type == "code":
            if cell.id == deck.imports:
                slides.pop()
                continue
            blocks = form.code("code", cell.source, False)
        elif cell.get("attachments"):
            blocks = [div("alone", blocks)]
        parts = _shown(cell, deck, form) if cell.cell_type == "code" else []
        joined = cell.cell_type == "code" and _begins_film(cell, deck)
        wrap = {"fragment": "fragment", "notes": "notes"}.get(kind)
        if wrap and parts and deck.pieces[cell.id][0].role == "solution":
            blocks, parts[0] = blocks + parts[0], []  # a solution comes with its verdict
        slides[-1] += [div(wrap, blocks)] if wrap else blocks
        for i, part in enumerate(parts):
            if i:  # what found no room under its code
                slides.append([raw(f"###### {title}", "markdown")])
            waits = part and not i and not cell.outputs
            slides[-1] += [div("fragment", part)] if waits else part
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


def _shown(cell: nbformat.NotebookNode, deck: Deck, form: Screen) -> list[list[dict]]:
    """What a cell has shown: on its slide as much as has room, then a slide each."""
    code, *outputs = deck.pieces[cell.id]
    used, parts = deck.before[cell.id] + deck.height(code), [[]]
    for piece in outputs:
        for blocks, height in _units(piece, form, deck):
            used += height
            if used > HIGH * SMALLER:
                parts.append([])
                used = SMALL + height
            parts[-1] += blocks
    return parts


def _units(piece: Piece, form: Screen, deck: Deck) -> Iterator[tuple[list[dict], float]]:
    """An output, or its parts if it is too high for a slide, each with its height."""
    height = deck.height(piece)
    if piece.kind == "text" and height > HIGH:
        for part in _fitting(_spoken(piece.text)):
            yield form.code("text", part, False), _of_code(part)
        return
    if not _is_rich(piece) or height <= HIGH:
        if blocks := _output(piece, form):
            yield blocks, height
        return
    for block in _apart(piece.blocks):
        yield [div("rich", form.made([block]))], deck.of_blocks([block])


def _apart(blocks: list[dict]) -> Iterator[dict]:
    """Blocks without what only holds them; a long table or listing is several."""
    for block in blocks:
        kind, content = block["t"], block.get("c")
        if kind == "Div" and not FLEX.search(dict(content[0][2]).get("style", "")):
            yield from _apart(content[1])
        elif kind == "CodeBlock":
            for part in _fitting(content[1]):
                yield {"t": kind, "c": [content[0], part]}
        elif kind == "Table":
            *front, [(attributes, heads, top, rows)], foot = content
            for i in range(0, len(rows), ROWS):
                body = [attributes, heads, top, rows[i : i + ROWS]]
                yield {"t": kind, "c": [*front, [body], foot]}
        else:
            yield block


def _output(piece: Piece, form: Screen) -> list[dict]:
    """What a cell has shown, as blocks of a page; the steps of a film have slides."""
    if piece.kind in ("text", "error"):
        said = _spoken(piece.text)
        return form.code(piece.kind, said, False) if said else []
    if piece.kind == "image":
        image = figure(piece.text, piece.alt, "")["c"][2]
        return form.made(image)
    if _is_rich(piece):
        return [div("rich", form.made(piece.blocks))]
    return []


def _begins_film(cell: nbformat.NotebookNode, deck: Deck) -> bool:
    """Whether a short cell has a film to show, and its first drawing has room under it."""
    code, *outputs = deck.pieces[cell.id]
    shown = [p for p in outputs if p.kind != "text" or _spoken(p.text)]
    film = [p for p in shown if p.kind == "html" and not _is_rich(p)]
    used = deck.before[cell.id] + deck.height(code)
    return len(shown) == len(film) == 1 and used < 0.25 * HIGH


def _is_rich(piece: Piece) -> bool:
    drawn = any(element["t"] == "Figure" for element in elements(piece.blocks))
    return piece.kind == "html" and not drawn


def write(out: Path, names: tuple = (), folder: Path = ROOT / "notebooks") -> list[str]:
    """Write the slides of the notebooks whose names begin so; returns a line for each."""
    paths = chosen(folder, names)
    with tempfile.TemporaryDirectory() as media:
        for path in paths:
            write_one(read(path, Path(media)), Path(media), out / path.name)
    return [f"{path.name}: open it in JupyterLab and press Alt+R" for path in paths]
