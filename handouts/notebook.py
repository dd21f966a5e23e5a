"""Read a notebook into pieces, each in the one form in which it can be printed.

A piece knows its cell, so that whatever goes wrong later can be reported with its place.
Nothing is executed: an output is what is stored.
"""

import ast
import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
UNFILLED = "not yet"  # what check() says of a blank
KEY = "handout"  # in a cell's metadata: {"note": …, "minutes": …, "caption": …, "slide": …}
IMAGES = {"image/svg+xml": "svg", "image/png": "png", "image/jpeg": "jpg"}
PRINTABLE = (*IMAGES, "text/markdown", "text/html", "text/latex", "text/plain")
CONTROLS = " (run this cell to get the controls)"  # a page has none
LIVE = re.compile(r"<(script|iframe|canvas|video|audio|object|embed|input|button)\b", re.I)
ADDRESS = re.compile(r"<[\w.]+ (object )?at 0x[0-9a-f]+>")
ANSI = re.compile(r"\x1b\[[0-9;]*m")
FILES = re.compile(r"(?<=\n```)\n\n\[[^\n]*\Z")  # links to them, below a listing
NAVIGATION = re.compile(r"(\[[^\]]*\]\([^)]*\)|[\s·|←→])+")
HEADING = re.compile(r"(#{1,6})\s+(.+)")
DATA_IMAGE = re.compile(r"data:(image/[\w+]+);base64,([A-Za-z0-9+/=\s]+)")
OPEN = "%%solution (click to open)\n"  # for the lab, where a solution is folded
VERDICT = ' \n<div class="verdict">'  # of an exercise's check; its text says the same
MARKDOWN_IMAGE = re.compile(r"(!\[[^\]]*\]\()([^)\s]+)")


class Unprintable(Exception):
    """Something in a notebook that no page can hold; each line begins with its place."""


@dataclass(frozen=True)
class Piece:
    """A heading, a paragraph, a code cell's source or one output.

    `kind` is "heading", "navigation", "predict", "prose", "code", "listing" (markdown that
    code made), "html", "text", "error" or "image" (then `text` is the file in the media
    folder). `role` is "exercise", "solution" or nothing.
    """

    kind: str
    text: str
    cell: int
    role: str = ""
    level: int = 0
    alt: str = ""
    caption: str = ""
    width: float = 0.0
    slide: str = ""
    about: dict = field(default_factory=dict, hash=False)


@dataclass
class Notebook:
    """A notebook as pieces, in reading order."""

    path: Path
    pieces: list[Piece]
    nested: bool = False  # a text in a folder of the repository, not at its top

    @property
    def id(self) -> str:
        """Its name in links and files; a README has that of its folder, or "readme"."""
        if self.path.suffix == ".ipynb":
            return self.path.stem
        folder = self.path.parent.name if self.nested else ""
        return (folder or self.path.stem).lower()

    @property
    def number(self) -> str:
        """The number of a notebook, such as "03"; nothing for another text."""
        return self.path.stem[:2] if self.path.suffix == ".ipynb" else ""

    @property
    def headline(self) -> str:
        return f"{self.number} {self.title}".strip()

    @property
    def title(self) -> str:
        titles = [p.text for p in self.pieces if p.kind == "heading" and p.level == 1]
        return titles[0] if titles else self.path.stem

    @property
    def minutes(self) -> int:
        """The minutes that its head names, or 0."""
        head = " ".join(p.text for p in self.pieces[:8] if p.kind == "prose")
        found = re.search(r"(\d+) minutes", head)
        return int(found[1]) if found else 0

    def anchors(self) -> set[str]:
        """What a link may point at: the headings, in the form that Jupyter links them."""
        return {slug(p.text) for p in self.pieces if p.kind == "heading"}

    def place(self, cell: int) -> str:
        """How a cell is named in a message."""
        return place(self.path, cell)


def place(path: Path, cell: int) -> str:
    """How a cell is named in a message: the file, and its number counted from 1."""
    if path.suffix != ".ipynb":
        return path.name
    return f"{path.parent.name}/{path.name}, cell {cell + 1}"


def slug(heading: str) -> str:
    """A heading as an anchor: letters and digits, words joined by hyphens."""
    return "-".join(re.findall(r"[^\W_]+", heading.lower()))


def read(path: Path, media: Path) -> Notebook:
    """Read one notebook and store its pictures in `media`.

    Raises Unprintable, with a line for each output that has no printable form.
    """
    media.mkdir(parents=True, exist_ok=True)
    pieces, problems = [], []
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        reader = _Reader(path, number, cell, media)
        try:
            pieces += reader.pieces()
        except Unprintable as problem:
            problems.append(str(problem))
    if problems:
        raise Unprintable("\n".join(problems))
    return Notebook(path, pieces)


def read_text(path: Path, media: Path, nested: bool = False) -> Notebook:
    """Read a page of markdown as if it were the one cell of a notebook."""
    text = path.read_text(encoding="utf-8")
    cell = {"cell_type": "markdown", "source": text, "metadata": {}}
    return Notebook(path, list(_Reader(path, 0, cell, media).pieces()), nested)


class _Reader:
    """Makes the pieces of one cell."""

    def __init__(self, path: Path, number: int, cell: dict, media: Path) -> None:
        self.path, self.cell, self.number, self.media = path, cell, number, media
        self.about = dict(cell["metadata"].get(KEY, {}))
        tags = cell["metadata"].get("tags", [])
        self.common = {
            "cell": number,
            "role": next((role for role in ("exercise", "solution") if role in tags), ""),
            "slide": cell["metadata"].get("slideshow", {}).get("slide_type", ""),
            "about": self.about,
        }

    def pieces(self) -> Iterator[Piece]:
        source = _text(self.cell["source"])
        if self.cell["cell_type"] == "markdown":
            yield from self._prose(source)
        elif self.cell["cell_type"] == "code":
            hint = ""
            if self.common["role"] == "exercise":
                source, hint = without_hint(source)
            elif self.common["role"] == "solution":
                source = source.removeprefix(OPEN)
            yield Piece("code", source, **self.common)
            for output in self.cell["outputs"]:
                for piece in self._output(output):
                    if piece.text.startswith(UNFILLED) and not self.common["role"]:
                        continue  # of use only to who can fill it in
                    more = f"\nhint: {hint}" if hint and "\nhint: " not in piece.text else ""
                    yield replace(piece, text=piece.text + more)

    def _prose(self, source: str) -> Iterator[Piece]:
        def kept(found: re.Match) -> str:
            return found[1] + self._keep_file(found[2])

        level = 0
        for text in paragraphs(source):
            under_title, heading = level == 1, HEADING.fullmatch(text)
            level = 0
            if heading:
                level = len(heading[1])
                yield Piece("heading", heading[2].strip(), level=level, **self.common)
            elif under_title and NAVIGATION.fullmatch(text):
                yield Piece("navigation", text, **self.common)
            else:
                before, question, asked = text.partition("**Predict")
                for kind, part in (("prose", before), ("predict", question + asked)):
                    if part := MARKDOWN_IMAGE.sub(kept, part.rstrip().lstrip("\n")):
                        yield Piece(kind, part, **self.common)

    def _keep_file(self, source: str) -> str:
        """Copy a picture that the prose shows into the media folder."""
        kind, _, name = source.partition(":")
        if kind == "attachment":
            mime, data = next(iter(self.cell["attachments"][name].items()))
            return self._keep(IMAGES.get(mime, ""), base64.b64decode(data))
        file = self.path.parent / source
        if not file.is_file():
            raise Unprintable(f"{place(self.path, self.number)}: no such picture: {source}")
        return self._keep(file.suffix[1:], file.read_bytes())

    def _output(self, output: dict) -> Iterator[Piece]:
        if output["output_type"] == "stream":
            yield Piece("text", _text(output["text"]).rstrip("\n"), **self.common)
        elif output["output_type"] == "error":
            trace = ANSI.sub("", "\n".join(output["traceback"]))
            text = trace or f"{output['ename']}: {output['evalue']}"
            yield Piece("error", text.rstrip("\n"), **self.common)
        else:
            data = {mime: _text(content) for mime, content in output["data"].items()}
            yield from self._bundle(data, output["metadata"])

    def _bundle(self, data: dict, metadata: dict) -> Iterator[Piece]:
        mime = next((mime for mime in PRINTABLE if mime in data), "")
        content = data.get(mime, "")
        bare = mime == "text/plain" and (len(data) > 1 or ADDRESS.search(content))
        if not mime or bare or (mime == "text/html" and LIVE.search(content)):
            forms = ", ".join(data) or "nothing"
            where = place(self.path, self.number)
            raise Unprintable(f"{where}: an output of {forms} has no printable form")
        if mime in IMAGES:
            yield self._image(mime, content, data, metadata)
        elif mime == "text/html" and content.startswith(VERDICT):
            yield Piece("text", data["text/plain"], **self.common)
        elif mime == "text/html":
            content = content.replace(CONTROLS, " (the notebook has controls for it)")
            yield Piece("html", self._store_images(content), **self.common)
        elif mime == "text/markdown":
            yield Piece("listing", FILES.sub("", content), **self.common)
        elif mime == "text/latex":
            yield Piece("prose", content, **self.common)
        else:
            yield Piece("text", content, **self.common)

    def _image(self, mime: str, content: str, data: dict, metadata: dict) -> Piece:
        raw = content.encode() if mime == "image/svg+xml" else base64.b64decode(content)
        text = data.get("text/plain", "")
        alt = _title(content) or text.split("\n")[0] or "picture"
        return Piece(
            "image",
            self._keep(IMAGES[mime], raw),
            alt=alt if text in ("", alt) else f"{alt}: {' / '.join(text.splitlines())}",
            caption=self.about.get("caption", alt[:1].upper() + alt[1:]),
            width=float(metadata.get(mime, {}).get("width", 0)),
            **self.common,
        )

    def _store_images(self, html: str) -> str:
        def kept(found: re.Match) -> str:
            return self._keep(IMAGES.get(found[1], "png"), base64.b64decode(found[2]))

        return DATA_IMAGE.sub(kept, html)

    def _keep(self, suffix: str, content: bytes) -> str:
        name = f"{hashlib.sha256(content).hexdigest()[:16]}.{suffix}"
        if not (self.media / name).exists():
            (self.media / name).write_bytes(content)
        if suffix == "svg":
            printed = _with_our_font(content.decode())
            (self.media / f"print-{name}").write_text(printed, encoding="utf-8")
        return name


def without_hint(source: str) -> tuple[str, str]:
    """An exercise without the hint that it gives to check(), and the hint."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "check":
            continue
        for word in node.keywords:
            if word.arg == "hint" and isinstance(word.value, ast.Constant):
                lines = source.split("\n")
                first, last = word.lineno - 1, word.end_lineno - 1
                before = lines[first].encode()[: word.col_offset].decode()
                after = lines[last].encode()[word.end_col_offset :].decode().removeprefix(",")
                if before.strip() or after.strip():  # it shares its line
                    if after.lstrip().startswith(")"):  # the last one
                        before = before.rstrip().removesuffix(",")
                    else:
                        after = after.lstrip()
                    lines[first : last + 1] = [before + after]
                else:
                    del lines[first : last + 1]
                return "\n".join(lines), word.value.value
    return source, ""


def _text(stored: str | list[str]) -> str:
    """A notebook stores a text as the list of its lines."""
    return stored if isinstance(stored, str) else "".join(stored)


def _with_our_font(svg: str) -> str:
    """A drawing names fonts of a system; on paper it has ours, smaller as it is wider."""
    svg = re.sub(r"font-family=(['\"]).*?\1", "font-family='DejaVu Sans'", svg)
    return re.sub(
        r"font-size=(['\"])([\d.]+)\1",
        lambda found: f"font-size='{float(found[2]) * 0.9:g}'",
        svg,
    )


def _title(svg: str) -> str:
    found = re.search(r"<title>(.*?)</title>", svg, re.S)
    return found[1].strip() if found else ""


def paragraphs(source: str) -> list[str]:
    """The paragraphs of a markdown text; a heading is one, and so is a fenced block.

    A list whose items stand apart, or an element of HTML that holds paragraphs, stays whole.
    """
    found: list[str] = []
    for block in _blocks(source):
        continues = re.match(r"[ \t]|[-*+] |\d+[.)] ", block)
        if found and continues and re.match(r"[-*+] |\d+[.)] ", found[-1]):
            found[-1] += f"\n\n{block}"
        else:
            found.append(block)
    return found


def _blocks(source: str) -> Iterator[str]:
    """What blank lines and headings separate, except inside a fence or an element."""
    block: list[str] = []
    fence, depth = "", 0
    for line in source.splitlines():
        mark = re.match(r"\s*(```+|~~~+|\$\$)", line)
        if fence:
            fence = "" if line.strip().endswith(fence) else fence
        elif mark and not (mark[1] == "$$" and line.count("$$") > 1):
            fence = mark[1]
        depth += len(re.findall(r"<(?:details|div)\b", line))
        depth -= len(re.findall(r"</(?:details|div)>", line))
        heading = HEADING.fullmatch(line)
        if fence or depth > 0 or (line.strip() and not heading):
            block.append(line)
            continue
        if block:
            yield "\n".join(block)
        block = []
        if heading:
            yield line
    if block:
        yield "\n".join(block)
