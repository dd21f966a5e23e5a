"""Read a notebook into pieces: headings, paragraphs, cells of code, and their outputs.

pandoc reads all markdown and HTML of a notebook at once, so a piece holds its text and the
blocks of a pandoc document. It knows its cell, so that a fault later can be reported with its
place. Nothing is executed: an output is what is stored.
"""

import ast
import base64
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import nbformat
from nbformat.v4 import new_markdown_cell

from handouts import convert

ROOT = Path(__file__).parent.parent
UNFILLED = "not yet"  # what check() says of a blank
KEY = "handout"  # in a cell's metadata: {"note": …, "caption": …, "slide": …}
ROLES = ("exercise", "solution", "finding")
IMAGES = {"image/svg+xml": "svg", "image/png": "png"}
PRINTABLE = (*IMAGES, "text/markdown", "text/html", "text/plain")
LIVE = re.compile(r"<(script|iframe|canvas|video|audio|object|embed|input|button)\b", re.I)
ADDRESS = re.compile(r"<[\w.]+ (object )?at 0x[0-9a-f]+>")
ANSI = re.compile(r"\x1b\[[0-9;]*m")
CODE = re.compile(r"(@|class |def |from \w+ import |import )")
NAVIGATION = re.compile(r"(\[[^\]]*\]\([^)]*\)|[\s·|←→])+")
SOLUTION = re.compile(r"# Solution.*\n")  # the line that folds it in the lab
# A picture of the README is dark by itself on GitHub; pages turn every picture round.
OWN_DARK = re.compile(rb'<style media="\(prefers-color-scheme: dark\)">.*?</style>')
# A form folds a solution itself, and what a reader would keep is of no use to it.
SHOWN = re.compile(r"<details><summary>What the solution shows</summary>(.*)</details>", re.S)
UNKEPT = re.compile(r"<p>Not kept in mine\.py: .*?</p>")
ASKED = re.compile(r"<summary>(.*?)</summary>(<ul>.*?</ul>)", re.S)  # of a build's stub


@dataclass(frozen=True)
class Piece:
    """A heading, a paragraph, a code cell's source or one output.

    `kind` is "heading", "navigation", "predict", "prose", "code", "listing" (code that code
    has shown), "html", "text", "error", "hint" (to an exercise), "asked" (what a build tries)
    or "image" (then `text` is the file in the media folder). `role` is "exercise",
    "solution", "finding" or nothing.
    """

    kind: str
    text: str
    cell: int
    role: str = ""
    level: int = 0
    alt: str = ""
    caption: str = ""
    width: float = 0.0
    blocks: list[dict] = field(default_factory=list, hash=False)
    about: dict = field(default_factory=dict, hash=False)
    unread: str = ""  # the format, while pandoc has still to read it


@dataclass
class Notebook:
    """A notebook as pieces, in reading order."""

    id: str  # in links and names of files
    path: Path
    pieces: list[Piece]
    notes: dict[int, list[dict]]  # for teachers, by cell

    @property
    def number(self) -> str:
        """The number of a notebook, such as "03"; nothing for another text."""
        return self.path.stem[:2] if self.path.suffix == ".ipynb" else ""

    @property
    def headline(self) -> str:
        return f"{self.number} {self.title}".strip()

    @property
    def title(self) -> str:
        return next((p.text for p in self.pieces if p.level == 1), self.path.stem)

    @property
    def head(self) -> str:
        return "\n\n".join(p.text for p in self.pieces if p.cell == 0)

    @property
    def minutes(self) -> int:
        """The minutes that its head names, or 0."""
        found = re.search(r"(\d+) minutes", self.head)
        return int(found[1]) if found else 0

    @property
    def question(self) -> str:
        """The sentence in bold that a chapter begins with, or nothing."""
        found = re.search(r"\*\*([^*]+\?)\*\*", self.head)
        return found[1][:1].upper() + found[1][1:] if found else ""

    def anchors(self) -> set[str]:
        """What a link may point at: the headings, in the form that Jupyter links them."""
        return {slug(p.text) for p in self.pieces if p.kind == "heading"}


def place(path: Path, cell: int) -> str:
    """How a cell is named in a message: the file, and its number counted from 1."""
    if path.suffix != ".ipynb":
        return path.name
    return f"{path.parent.name}/{path.name}, cell {cell + 1}"


def slug(heading: str) -> str:
    """A heading as an anchor: letters and digits, words joined by hyphens."""
    return "-".join(re.findall(r"[^\W_]+", heading.lower()))


def chosen(folder: Path, names: tuple = ()) -> list[Path]:
    """The notebooks whose names begin so, or all."""
    every = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    return [path for path in every if path.name.startswith(tuple(names) or "")]


def read(path: Path, media: Path, name: str = "") -> Notebook:
    """Read a notebook, or a text as if it were its one cell; store its pictures in `media`.

    Raises Unprintable, with a line for each output that has no printable form.
    """
    cells = [new_markdown_cell(path.read_text("utf-8"))]
    if path.suffix == ".ipynb":
        cells = nbformat.read(path, as_version=4).cells
    media.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    readers = [_Reader(path, i, cell, media, problems) for i, cell in enumerate(cells)]
    pieces = [piece for reader in readers for piece in reader.pieces()]
    texts = [(p.unread, p.text + "\n") for p in pieces if p.unread]  # a heading may end it
    parsed = iter(convert.parsed(texts))
    whole: list[Piece] = []
    for piece in pieces:
        whole += readers[piece.cell].parts(piece, next(parsed)) if piece.unread else [piece]
    if problems:
        raise convert.Unprintable("\n".join(problems))
    notes = {piece.cell: piece.blocks for piece in whole if piece.kind == "note"}
    pieces = [piece for piece in whole if piece.kind != "note"]
    return Notebook(name or path.stem, path, pieces, notes)


class _Reader:
    """Makes the pieces of one cell, first those that pandoc has not read."""

    def __init__(self, path: Path, i: int, cell: dict, media: Path, problems: list) -> None:
        self.folder, self.cell, self.media, self.problems = path.parent, cell, media, problems
        self.where = place(path, i)
        self.about = dict(cell["metadata"].get(KEY, {}))
        tags = cell["metadata"].get("tags", [])
        role = next((role for role in ROLES if role in tags), "")
        self.common = {"cell": i, "role": role, "about": self.about}

    def _problem(self, text: str) -> None:
        self.problems.append(f"{self.where}: {text}")

    def pieces(self) -> Iterator[Piece]:
        source, hint, role = self.cell.source, "", self.common["role"]
        if note := self.about.get("note"):
            yield Piece("note", note, unread="markdown", **self.common)
        if self.cell.cell_type == "markdown":
            yield Piece("cell", source, unread="markdown", **self.common)
            return
        if role == "exercise":
            source, hint = without_hint(source)
        elif role == "solution":
            source = SOLUTION.sub("", source, count=1)
        yield Piece("code", source, **self.common)
        for output in self.cell.outputs:
            piece = self._output(output)
            if not output.get("data", {}).get("text/plain", "").startswith(UNFILLED):
                yield piece
            elif role == "exercise":  # of use only to who can fill it in
                if told := ASKED.search(output.data.get("text/html", "")):
                    text = f"<p>{told[1]}</p>{told[2]}"
                    yield replace(piece, kind="asked", text=text, unread="html")
                text = " ".join(hint.split("\n"))
                yield replace(piece, kind="hint", text=text, unread="markdown")

    def _output(self, output: dict) -> Piece:
        if output.output_type == "stream":
            return Piece("text", output.text.rstrip("\n"), **self.common)
        if output.output_type == "error":
            text = ANSI.sub("", "\n".join(output.traceback))
            return Piece("error", text.rstrip("\n"), **self.common)
        data = output.data
        mime = next((mime for mime in PRINTABLE if mime in data), "")
        content = data.get(mime, "")
        bare = mime == "text/plain" and (len(data) > 1 or ADDRESS.search(content))
        if not mime or bare or (mime == "text/html" and LIVE.search(content)):
            self._problem(f"an output of {', '.join(data)} has no printable form")
        elif mime in IMAGES:
            return self._image(mime, content, data, output.metadata)
        elif mime == "text/markdown":
            return Piece("listing", content, unread="markdown", **self.common)
        elif mime == "text/html":
            shown = UNKEPT.sub("", SHOWN.sub(r"\1", content))
            return Piece("html", shown, unread="html", **self.common)
        return Piece("text", data.get("text/plain", ""), **self.common)

    def _image(self, mime: str, content: str, data: dict, metadata: dict) -> Piece:
        raw = content.encode() if mime == "image/svg+xml" else base64.b64decode(content)
        text = data.get("text/plain", "")
        title = re.search(r"<title>(.*?)</title>", content, re.S)
        alt = title[1].strip() if title else text.split("\n")[0] or "picture"
        return Piece(
            "image",
            self._keep(IMAGES[mime], raw),
            alt=alt if text in ("", alt) else f"{alt}: {' / '.join(text.splitlines())}",
            caption=self.about.get("caption", alt[:1].upper() + alt[1:]),
            width=float(metadata.get(mime, {}).get("width", 0)),
            **self.common,
        )

    def parts(self, piece: Piece, blocks: list[dict]) -> Iterator[Piece]:
        """The pieces of a text that pandoc has read: one for an output."""
        for element in elements(blocks):
            if element["t"] == "Image":
                if not stringify(element):
                    self._problem("a picture without alternative text")
                element["c"][2][0] = self._keep_file(element["c"][2][0])
        piece = replace(piece, unread="")
        if piece.kind == "cell":
            yield from self._paragraphs(piece, blocks)
        elif piece.kind == "listing":  # below it stand links to the files
            code = [e for e in elements(blocks) if e["t"] == "CodeBlock"]
            text = "\n\n\n".join(block["c"][1] for block in code)
            yield replace(piece, text=text, blocks=code)
        elif piece.kind in ("note", "hint"):
            yield replace(piece, blocks=[block["c"][1][0] for block in blocks])
        else:
            if not stringify(blocks).strip() and "'Image'" not in str(blocks):
                self._problem("an output of text/html has no printable form")
            for code in (e for e in elements(blocks) if e["t"] == "CodeBlock"):
                if CODE.match(code["c"][1]):  # a problem's solution shows the text that won
                    code["c"][0][1] = ["python"]
            yield replace(piece, blocks=blocks)

    def _paragraphs(self, cell: Piece, blocks: list[dict]) -> Iterator[Piece]:
        lines = cell.text.splitlines()
        level, inside = 0, []  # of the heading above; the pieces of an open <details>
        places = [dict(div["c"][0][2])["lines"] for div in blocks]
        begins = [min(map(int, re.findall(r"(\d+):", each))) - 1 for each in places]
        for div, (first, last) in zip(blocks, pairwise([*begins, len(lines)]), strict=True):
            text = "\n".join(lines[first:last]).rstrip()
            block = div["c"][1][0]
            piece = replace(cell, kind="prose", text=text, blocks=[block])
            under_title, level = level == 1, block["c"][0] if block["t"] == "Header" else 0
            html = block["c"][1] if block["t"] == "RawBlock" else ""
            if inside or html.startswith("<details"):
                inside.append(piece)
                if "</details" in html:
                    text = "\n\n".join(part.text for part in inside)
                    yield replace(piece, text=text, blocks=[p.blocks[0] for p in inside])
                    inside = []
            elif level:
                title = text.lstrip("#").strip()
                yield replace(piece, kind="heading", text=title, level=level)
            elif under_title and NAVIGATION.fullmatch(text):
                yield replace(piece, kind="navigation")
            else:
                yield from _asked_apart(piece)

    def _keep_file(self, source: str) -> str:
        """Copy a picture that a text shows into the media folder."""
        if source.startswith("data:"):
            mime, _, data = source[5:].partition(";base64,")
            return self._keep(IMAGES[mime], base64.b64decode(data))
        file = self.folder / source
        if not file.is_file():
            self._problem(f"no such picture: {source}")
            return source
        content = file.read_bytes()
        if file.suffix == ".svg":
            content = OWN_DARK.sub(b"", content)
        return self._keep(file.suffix[1:], content)

    def _keep(self, suffix: str, content: bytes) -> str:
        name = f"{hashlib.sha256(content).hexdigest()[:16]}.{suffix}"
        (self.media / name).write_bytes(content)
        if suffix == "svg":
            printed = _with_our_font(content.decode())
            (self.media / f"print-{name}").write_text(printed, encoding="utf-8")
        return name


def _asked_apart(piece: Piece) -> Iterator[Piece]:
    """A paragraph, cut before its prediction."""
    before, question, asked = piece.text.partition("**Predict")
    if not question or piece.blocks[0]["t"] != "Para":  # as in a list of advice
        yield piece
        return
    block = piece.blocks[0]
    inlines = block["c"]
    bold = [stringify(inline) if inline["t"] == "Strong" else "" for inline in inlines]
    start = next(i for i, words in enumerate(bold) if words.startswith("Predict"))
    if before.strip():
        yield replace(piece, text=before.rstrip(), blocks=[{**block, "c": inlines[:start]}])
    asked_block = {**block, "c": inlines[start:]}
    yield replace(piece, kind="predict", text=question + asked, blocks=[asked_block])


def elements(node: list | dict) -> Iterator[dict]:
    """All elements of a pandoc document, those that hold others first."""
    if isinstance(node, list):
        for child in node:
            yield from elements(child)
    elif isinstance(node, dict):
        if "t" in node:
            yield node
        yield from elements(node.get("c", []))


def stringify(node: list | dict) -> str:
    """The words of a part of a pandoc document."""
    said = {"Str": lambda e: e["c"]}
    said |= dict.fromkeys(("Code", "CodeBlock", "Math"), lambda e: e["c"][1])
    said |= dict.fromkeys(("Space", "SoftBreak", "LineBreak"), lambda e: " ")
    return "".join(said[e["t"]](e) for e in elements(node) if e["t"] in said)


def without_hint(source: str) -> tuple[str, str]:
    """An exercise without the hint that it gives to check(), and the hint."""
    for node in ast.walk(ast.parse(source)):
        checks = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check"
        for word in node.keywords if checks else []:
            if word.arg == "hint" and isinstance(word.value, ast.Constant):
                written = re.escape(ast.get_source_segment(source, word))
                return re.sub(rf",?\s*{written}", "", source, count=1), word.value.value
    return source, ""


def _with_our_font(svg: str) -> str:
    """A drawing names fonts of a system; on paper it has ours, smaller as it is wider."""
    fonts = {True: "font-family='DejaVu Sans Mono'", False: "font-family='DejaVu Sans'"}
    family = re.compile(r"font-family=(['\"]).*?\1")
    svg = family.sub(lambda found: fonts["mono" in found[0].lower()], svg)
    size = re.compile(r"font-size=(['\"])([\d.]+)\1")
    return size.sub(lambda found: f"font-size='{float(found[2]) * 0.9:g}'", svg)
