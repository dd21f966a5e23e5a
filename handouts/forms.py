"""The form of a block: Typst text for paper, or what pandoc writes for screens.

The functions that the Typst text calls are in paper.typ.
"""

import base64
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from handouts.notebook import slug, stringify

STUDENT, INSTRUCTOR, HTML, EPUB = "student", "instructor", "html", "epub"
KEPT = (
    "predict",
    "listing",
    "rich",
    "film",
    "explore",
    "asked",
    "panels",
    "panel",
    "caption",
)  # what a style sheet speaks of
BOXES = ("lead", "predict", "hint", "solution", "note")  # functions of paper.typ
CALLS = {"code": "source", "text": "shown", "error": "failure"}
MIMES = {".svg": "image/svg+xml", ".png": "image/png"}
# A picture that plays when it is asked to says that nothing in it moves: tools/docs.py.
MOVES = re.compile(rb"<style media='not all'>(.*?)</style>", re.S)
SECONDS = re.compile(rb"([\d.]+)s step")
DRAWN = re.compile(rb"<svg[^>]*?\bwidth=['\"]([\d.]+)[^>]*?\bheight=['\"]([\d.]+)")
LETTERS = re.compile(rb"font-size=['\"]([\d.]+)")
READ = 9  # pixels: smaller letters of a picture are not read
COLUMNS = re.compile(r"\S {2,}\S")  # in a line of an output
FLEX = re.compile(r"display:\s*flex")
FOLDED = {"hint": "Hint", "solution": "Solution", "answer": "Open this after your prediction"}


@dataclass
class Book:
    """What all chapters share."""

    root: Path  # of the repository
    media: Path = Path()  # where pictures were kept
    targets: dict[str, tuple[str, set[str]]] = field(default_factory=dict)  # id, anchors
    series: str = ""  # the title
    github: str = ""  # the repository, for the ways to open a notebook elsewhere
    author: str = ""
    date: str = ""
    picture: tuple[str, str] = ("", "")  # of the cover: its file, and what it shows
    # the name of each part and its chapters, by the id of the first
    parts: dict[str, tuple[str, list[tuple[str, str]]]] = field(default_factory=dict)


def element(kind: str, content: list) -> dict:
    return {"t": kind, "c": content}


def div(kind: str, blocks: list[dict]) -> dict:
    return element("Div", [["", [kind], []], blocks])


def words(text: str) -> list[dict]:
    """A text without any marks."""
    return [element("Str", text)]


def raw(text: str, language: str = "typst") -> dict:
    return element("RawBlock", [language, text])


def heading(level: int, inlines: list[dict], name: str = "", *classes: str) -> dict:
    return element("Header", [level, [name, [*classes], []], inlines])


def figure(file: str, alt: str, caption: str, width: float = 0) -> dict:
    size = [["width", f"{width:g}"]] if width else []
    image = element("Image", [["", [], size], words(alt), [file, ""]])
    long = [element("Plain", words(caption))]
    return element("Figure", [["", [], []], [None, long], [element("Plain", [image])]])


def parts_of(figure: dict) -> tuple[dict, str, str]:
    """The picture of a figure, its alternative text and its caption."""
    _, (_, caption), (plain, *_) = figure["c"]
    image = plain["c"][0]
    return image, stringify(image["c"][1]), stringify(caption)


class Form:
    """Goes through blocks, from the outside to the inside; a method for a kind of element."""

    def __init__(self, name: str, page: str, file: Path, book: Book) -> None:
        self.name, self.page, self.file, self.book = name, page, file, book
        self.where, self.problems = str(file), []

    def made(self, node: list) -> list:
        """The same elements in this form; one may become several."""
        found: list = []
        for child in node:
            if isinstance(child, dict):
                found += getattr(self, f"_{child['t'].lower()}", self._inside)(child)
            else:
                found.append(self.made(child) if isinstance(child, list) else child)
        return found

    def _inside(self, outer: dict) -> list[dict]:
        inner = outer.get("c")
        return [outer | {"c": self.made(inner)} if isinstance(inner, list) else outer]

    def _link(self, link: dict) -> list[dict]:
        attributes, content, (target, title) = link["c"]
        content = self.made(content)
        if re.match(r"[A-Za-z][\w+.-]*:", target):
            return [element("Link", [attributes, content, [target, title]])]
        path, _, anchor = target.partition("#")
        file = os.path.normpath(self.file.parent / path) if path else self.file.as_posix()
        page, anchors = self.book.targets.get(file, ("", set()))
        anchor = slug(anchor)
        if not page:
            if not (self.book.root / file).exists():
                self.problems.append(f"{self.where}: a link leads nowhere: {target}")
            return content  # a file of the repository, not of the book
        if anchor and anchor not in anchors:
            self.problems.append(f"{self.where}: no such heading: {target}")
        if self.name in (STUDENT, INSTRUCTOR):
            return within(f"#nb({typst(page)}, {typst(anchor)})", content)
        if self.name == EPUB:
            target = f"#{page}--{anchor}" if anchor else f"#{page}"
        else:
            place = "" if page == self.page and anchor else f"{page}.html"
            target = f"{place}#{anchor}" if anchor else place
        return [element("Link", [attributes, content, [target, title]])]


def typst(value: object) -> str:
    """A value in the Typst language."""
    if isinstance(value, str):
        text = value.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "    ")
        return '"' + text.replace("\n", "\\n") + '"'
    if isinstance(value, tuple | list):
        return "(" + "".join(f"{typst(each)}, " for each in value) + ")"
    return "none" if value is None else str(value).lower()


def call(name: str, *values: object, **named: object) -> dict:
    """The call of a function of paper.typ."""
    given = [*map(typst, values), *(f"{key}: {typst(value)}" for key, value in named.items())]
    return raw(f"#{name}({', '.join(given)})")


def within(call: str, inlines: list[dict]) -> list[dict]:
    opening, end = ([element("RawInline", ["typst", text])] for text in (f"{call}[", "]"))
    return opening + inlines + end


class Paper(Form):
    def box(self, kind: str, blocks: list[dict]) -> list[dict]:
        return [raw(f"#{kind}["), *blocks, raw("]")] if kind in BOXES else blocks

    def code(self, kind: str, text: str, apart: bool) -> list[dict]:
        more = {"apart": apart} if kind == "code" else {}
        return [call(CALLS[kind], text, **more)]

    def film(self, steps: list[dict], blocks: list[dict], caption: str) -> list[dict]:
        parts = [parts_of(step) for step in steps]
        items = [(image["c"][2][0], f"{alt}, {name}", name) for image, alt, name in parts]
        return [call("filmstrip", items, caption, where=self.where)]

    def asked(self, kind: str, label: str, number: int) -> list[dict]:
        return [call(kind, label, number)]

    def _div(self, block: dict) -> list[dict]:
        (_, _, attributes), content = block["c"]
        if not FLEX.search(dict(attributes).get("style", "")):
            return self.made(content)
        items = []
        for panel in content:  # one a rank
            _, (name, *text) = panel["c"]
            items.append((stringify(name), _edge(panel), stringify(text)))
        return [call("panels", items, where=self.where)]

    def _span(self, span: dict) -> list[dict]:
        (_, _, attributes), content = span["c"]
        plate = re.search(r"background:\s*(#[0-9a-fA-F]+)", dict(attributes).get("style", ""))
        content = self.made(content)
        return within(f"#plate({typst(plate[1])})", content) if plate else content

    def _figure(self, block: dict) -> list[dict]:
        image, alt, caption = parts_of(block)
        (_, _, size), _, (file, _) = image["c"]
        width = float(dict(size).get("width", 0)) or None
        return [call("picture", file, alt, caption, width=width, where=self.where)]

    def _codeblock(self, block: dict) -> list[dict]:
        (_, classes, _), text = block["c"]
        return [call("listing", text, classes[0] if classes else "")]

    def _rawblock(self, block: dict) -> list[dict]:
        """Print has no folds."""
        language, text = block["c"]
        if not language.startswith("html"):
            return [block]
        if text.startswith("<details"):
            title = re.search(r"<summary>(.*?)</summary>", text)
            return [raw(f"#folded[#strong({typst(title[1])})" if title else "#folded[")]
        if text.startswith("<summary"):
            return [raw("#strong[")]
        return [raw("]")] if text.startswith("</") else [block]

    def _para(self, block: dict) -> list[dict]:
        first = block["c"][0] if block["c"] else {"t": ""}
        if first["t"] == "Image" and len(block["c"]) == 1:  # a picture that stands alone
            _, alt, (file, _) = first["c"]
            return self._figure(figure(file, stringify(alt), stringify(alt)))
        (made,) = self._inside(block)
        if first["t"] == "Str" and first["c"][0] in "=+/-":  # no heading and no list item
            made["c"].insert(0, element("RawInline", ["typst", "\\"]))
        return [made]

    _plain = _para

    def _table(self, table: dict) -> list[dict]:
        return [raw(f"#tabular({typst(self.where)})["), *self._inside(table), raw("]")]

    def _math(self, formula: dict) -> list[dict]:
        alt = typst(formula["c"][1])
        return within(f"#equation({alt}, {typst(self.where)})", [formula])


def _edge(panel: dict) -> str:
    """The colour of a rank's panel."""
    style = dict(panel["c"][0][2])["style"]
    return re.search(r"border[\w-]*:[^;]*(#[0-9a-fA-F]+)", style)[1]


def _panel(panel: dict) -> dict:
    style = [["style", f"border-color:{_edge(panel)}"]]
    return element("Div", [["", ["panel"], style], panel["c"][1]])


class Screen(Form):
    def box(self, kind: str, blocks: list[dict]) -> list[dict]:
        if kind == "answer" and "<details" in str(blocks[0]["c"]):
            return blocks  # the page folds it itself
        if kind in FOLDED and (self.name == HTML or kind == "solution"):
            opening = f'<details class="{kind}"><summary>{FOLDED[kind]}</summary>'
            return [raw(opening, "html"), *blocks, raw("</details>", "html")]
        if kind == "hint":
            first = [element("Emph", words("Hint:")), {"t": "Space"}, *blocks[0]["c"]]
            return [blocks[0] | {"c": first}, *blocks[1:]]
        return [div(kind, blocks)] if kind in KEPT else blocks

    def code(self, kind: str, text: str, apart: bool) -> list[dict]:
        classes = ["python"] if kind == "code" else ["output", kind]
        if kind == "text" and COLUMNS.search(text):
            classes.append("columns")  # a phone scrolls what it can't wrap
        return self._codeblock(element("CodeBlock", [["", classes, []], text]))

    def film(self, steps: list[dict], blocks: list[dict], caption: str) -> list[dict]:
        said = div("caption", [element("Para", words(caption))])
        if self.name == EPUB:  # an electronic book plays nothing and folds nothing
            return [div("rich", [*self.made(steps), said])]
        return [div("rich", [*self.made(blocks), said])]

    def asked(self, kind: str, label: str, number: int) -> list[dict]:
        if kind == "answer":
            return [heading(3, words(f"To question {number}"), label, "unlisted")]
        text = words("The answer stands at the end of the chapter.")
        return [element("Para", [element("Link", [["", [], []], text, [f"#{label}", ""]])])]

    def _div(self, block: dict) -> list[dict]:
        attributes, content = block["c"]
        if FLEX.search(dict(attributes[2]).get("style", "")):  # a panel a rank
            return self.made([div("panels", [_panel(panel) for panel in content])])
        kept = attributes[1][:1] and attributes[1][0] in KEPT
        return self._inside(block) if kept else self.made(content)

    def _codeblock(self, block: dict) -> list[dict]:
        (name, classes, _), text = block["c"]
        return [element("CodeBlock", [[name, classes, [["tabindex", "0"]]], text])]

    def _image(self, image: dict) -> list[dict]:
        attributes, alt, (file, title) = image["c"]
        if self.name == HTML:  # a page needs no other file
            name, classes, more = attributes
            more = dict(more)
            if still := MOVES.search(kept(self.book, file)):
                seconds = max(map(float, SECONDS.findall(still[1])), default=0)
                classes, more["seconds"] = [*classes, "moves"], f"{seconds:g}"
            if small := sizes(self.book, file):
                more["style"] = f"{more.get('style', '')};{small}".lstrip(";")
            attributes = [name, classes, [list(pair) for pair in more.items()]]
            file = in_page(self.book, file)
        return [element("Image", [attributes, alt, [file, title]])]

    def _para(self, block: dict) -> list[dict]:
        (made,) = self._inside(block)
        if [inline["t"] for inline in made["c"]] == ["Image"]:  # it stands alone
            return [reached("Div", "picture", [made | {"t": "Plain"}])]
        return [made]

    _plain = _para

    def _figure(self, block: dict) -> list[dict]:
        attributes, caption, _ = block["c"]
        image = element("Plain", self._image(parts_of(block)[0]))
        content = [reached("Div", "picture", [image])]
        return [element("Figure", [attributes, caption, content])]

    def _table(self, table: dict) -> list[dict]:
        return [reached("Div", "table", self._inside(table))]

    def _math(self, formula: dict) -> list[dict]:
        if formula["c"][0]["t"] == "InlineMath":
            return [formula]
        return [reached("Span", "formula", [formula])]


def sizes(book: Book, file: str) -> str:
    """Of a drawing: how wide it must be for its smallest words to be read, and its shape."""
    content = kept(book, file)
    drawn, letters = DRAWN.search(content), LETTERS.findall(content)
    if not drawn or not letters:
        return ""
    wide, high = map(float, drawn.groups())
    return f"--least:{READ * wide / min(map(float, letters)):.0f}px;--shape:{wide / high:.2f}"


def kept(book: Book, file: str) -> bytes:
    return (book.media / file).read_bytes()


def in_page(book: Book, file: str) -> str:
    """A picture as an address that needs no other file."""
    data = base64.b64encode(kept(book, file)).decode()
    return f"data:{MIMES[Path(file).suffix]};base64,{data}"


def reached(kind: str, what: str, content: list[dict]) -> dict:
    """What is reached by the keyboard, where it is wider than the page."""
    named = [["tabindex", "0"], ["role", "group"], ["aria-label", what]]
    return element(kind, [["", [what], named], content])
