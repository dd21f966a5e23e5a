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
KEPT = ("predict", "listing", "rich", "film")  # what a style sheet speaks of
BOXES = ("lead", "predict", "hint", "solution", "note")  # functions of paper.typ
MIMES = {".svg": "image/svg+xml", ".png": "image/png"}
FOLDED = {"hint": "Hint", "solution": "Solution", "answer": "Open this after your prediction"}


@dataclass
class Book:
    """The repository, where pictures were kept, and what a link may lead to, by its file."""

    root: Path
    media: Path
    targets: dict[str, tuple[str, set[str]]] = field(default_factory=dict)  # id, anchors


def element(kind: str, content: list) -> dict:
    return {"t": kind, "c": content}


def div(kind: str, blocks: list[dict], **attributes: str) -> dict:
    return element("Div", [["", [kind], list(map(list, attributes.items()))], blocks])


def words(text: str) -> list[dict]:
    """A text without any marks."""
    return [element("Str", text)]


def raw(text: str, language: str = "typst", kind: str = "RawBlock") -> dict:
    return element(kind, [language, text])


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
            call = raw(f"#nb({typst(page)}, {typst(anchor)})[", kind="RawInline")
            return [call, *content, raw("]", kind="RawInline")]
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


class Paper(Form):
    def box(self, kind: str, blocks: list[dict]) -> list[dict]:
        return [raw(f"#{kind}["), *blocks, raw("]")] if kind in BOXES else blocks

    def source(self, text: str, apart: bool) -> list[dict]:
        return [call("source", text, apart=apart)]

    def output(self, text: str, kind: str) -> list[dict]:
        return [call("failure" if kind == "error" else "shown", text)]

    def film(self, steps: list[dict], blocks: list[dict], caption: str) -> list[dict]:
        parts = [parts_of(step) for step in steps]
        items = [(image["c"][2][0], f"{alt}, {name}", name) for image, alt, name in parts]
        return [call("filmstrip", items, caption, where=self.where)]

    def answers(self, label: str, number: int) -> list[dict]:
        return [call("answer", label, number)]

    def room(self, label: str, number: int) -> list[dict]:
        return [call("room", label, number)]

    def _div(self, block: dict) -> list[dict]:
        (_, _, attributes), content = block["c"]
        if not re.search(r"display:\s*flex", dict(attributes).get("style", "")):
            return self.made(content)
        items = []
        for panel in content:  # one a rank
            (_, _, attributes), (name, *text) = panel["c"]
            edge = re.search(r"border[\w-]*:[^;]*(#[0-9a-fA-F]+)", dict(attributes)["style"])
            items.append((stringify(name), edge[1] if edge else "#666666", stringify(text)))
        return [call("panels", items, where=self.where)]

    def _figure(self, block: dict) -> list[dict]:
        image, alt, caption = parts_of(block)
        width = dict(image["c"][0][2]).get("width")
        size = float(width) if width else None
        given = image["c"][2][0], alt, caption
        return [call("picture", *given, width=size, where=self.where)]

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
            made["c"].insert(0, raw("\\", kind="RawInline"))
        return [made]

    _plain = _para

    def _table(self, table: dict) -> list[dict]:
        return [
            raw(f"#tabular(where: {typst(self.where)})["),
            *_to_the_left(self, table),
            raw("]"),
        ]

    def _math(self, formula: dict) -> list[dict]:
        opening = f"#equation({typst(formula['c'][1])}, {typst(self.where)})["
        return [raw(opening, kind="RawInline"), formula, raw("]", kind="RawInline")]


def _to_the_left(form: Form, table: dict) -> list[dict]:
    """A table whose columns stand on the left unless they say where."""
    (made,) = form._inside(table)
    for column in made["c"][2]:
        if column[0]["t"] == "AlignDefault":
            column[0] = {"t": "AlignLeft"}
    return [made]


class Screen(Form):
    def box(self, kind: str, blocks: list[dict]) -> list[dict]:
        if self.name == HTML and kind in FOLDED:
            opening = f'<details class="{kind}"><summary>{FOLDED[kind]}</summary>'
            return [raw(opening, "html"), *blocks, raw("</details>", "html")]
        if kind == "solution":
            title = element("Para", [element("Strong", words("Solution"))])
            return [div("solution", [title, *blocks])]
        if kind == "hint":
            first = [element("Emph", words("Hint:")), {"t": "Space"}, *blocks[0]["c"]]
            return [blocks[0] | {"c": first}, *blocks[1:]]
        return [div(kind, blocks)] if kind in KEPT else blocks

    def source(self, text: str, apart: bool) -> list[dict]:
        return self._codeblock(element("CodeBlock", [["", ["python"], []], text]))

    def output(self, text: str, kind: str) -> list[dict]:
        return self._codeblock(element("CodeBlock", [["", ["output", kind], []], text]))

    def film(self, steps: list[dict], blocks: list[dict], caption: str) -> list[dict]:
        said = element("Para", [element("Emph", words(caption))])
        return [div("rich", [*self.made(blocks), said])]

    def answers(self, label: str, number: int) -> list[dict]:
        return [heading(3, words(f"To question {number}"), label, "unlisted")]

    def room(self, label: str, number: int) -> list[dict]:
        text = words("The answer stands at the end of the chapter.")
        return [element("Para", [element("Link", [["", [], []], text, [f"#{label}", ""]])])]

    def _div(self, block: dict) -> list[dict]:
        attributes, content = block["c"]
        kept = attributes[1][:1] and attributes[1][0] in KEPT
        return self._inside(block) if kept else self.made(content)

    def _codeblock(self, block: dict) -> list[dict]:
        (name, classes, _), text = block["c"]
        return [element("CodeBlock", [[name, classes, [["tabindex", "0"]]], text])]

    def _image(self, image: dict) -> list[dict]:
        attributes, alt, (file, title) = image["c"]
        if self.name == HTML:  # a page needs no other file
            data = base64.b64encode((self.book.media / file).read_bytes()).decode()
            file = f"data:{MIMES[Path(file).suffix]};base64,{data}"
        return [element("Image", [attributes, alt, [file, title]])]

    def _figure(self, block: dict) -> list[dict]:
        attributes, caption, _ = block["c"]
        image = element("Plain", self._image(parts_of(block)[0]))
        return [
            element(
                "Figure",
                [attributes, caption, [element("Div", [reached("picture"), [image]])]],
            )
        ]

    def _table(self, table: dict) -> list[dict]:
        return [element("Div", [reached("table"), _to_the_left(self, table)])]

    def _math(self, formula: dict) -> list[dict]:
        if formula["c"][0]["t"] == "InlineMath":
            return [formula]
        return [element("Span", [reached("formula"), [formula]])]


def reached(what: str) -> list:
    """The attributes of what is reached by the keyboard, where it is wider than the page."""
    return ["", [what], [["tabindex", "0"], ["role", "group"], ["aria-label", what]]]
