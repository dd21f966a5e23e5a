"""The web pages: one self-contained file a notebook, and an index with a search."""

import base64
import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from handouts import convert
from handouts.doors import doors
from handouts.editions import HTML, div, edition, raw
from handouts.notebook import Notebook, elements, slug, stringify

ROOM = Path(__file__).parent
FORMS = {
    "PDF for students": "student/{0}.pdf",
    "for instructors": "instructor/{0}.pdf",
    "live slides": "slides/{0}.ipynb",
}
COPIES = {"notebook": "notebooks/{0}.ipynb", "with open predictions": "open/{0}.ipynb"}
BOOKS = {
    "Student's book": "student/book.pdf",
    "Instructor's book": "instructor/book.pdf",
    "EPUB": "book.epub",
}
PARTS = {  # by the chapter that each begins with
    "processes_and_ranks": "Messages",
    "data_partitioning": "The batch is shared",
    "sharding": "The model is shared",
    "at_scale": "All together",
}


@dataclass(frozen=True)
class Site:
    """Where the pages stand beside the other forms, and what else is beside them."""

    pages: str = "html"
    base: str = "../"  # from a page to the other forms
    hosted: bool = False  # with the notebooks to download
    github: str = ""  # the repository, for the ways to open a notebook elsewhere

    def links(self, targets: dict[str, str], name: str = "") -> str:
        """Links to files beside the pages."""
        there = {label: self.base + to.format(name) for label, to in targets.items()}
        return _links(there)

    def forms(self, name: str) -> str:
        """Links to all forms of a notebook."""
        copies = self.links(COPIES, name) if self.hosted else ""
        ways = doors(self.github, name)
        opened = _links({f"open in {label}": to for label, to in ways.items()})
        return " ".join(filter(None, [self.links(FORMS, name), copies, opened]))


def _links(targets: dict[str, str]) -> str:
    pairs = targets.items()
    return " ".join(f'<a href="{html.escape(to)}">{html.escape(it)}</a>' for it, to in pairs)


def _sections(notebook: Notebook) -> Iterator[tuple[str, str, str]]:
    """Each heading with its anchor and the words under it, for the search."""
    title, anchor, words = notebook.headline, "", []
    for piece in notebook.pieces:
        if piece.kind == "heading" and piece.level > 1:
            yield title, anchor, " ".join(words)
            title, anchor, words = stringify(piece.blocks), slug(piece.text), []
        elif piece.kind in ("prose", "predict", "listing") and not piece.role:
            words.append(stringify(piece.blocks))
        elif piece.kind == "code" and not piece.role:
            words.append(" ".join(piece.text.split()))
    yield title, anchor, " ".join(words)


def neighbours(notebooks: list[Notebook], i: int) -> tuple[tuple[str, str], ...]:
    """The notebook before and the one after, as (id, headline); empty at the ends."""
    if i >= len(notebooks):
        return (("", ""), ("", ""))
    beside = [notebooks[i - 1] if i else None, *notebooks[i + 1 : i + 2], None][:2]
    return tuple((n.id, n.headline) if n else ("", "") for n in beside)


def page(
    notebook: Notebook,
    meta: dict,
    series: str,
    beside: tuple[tuple[str, str], ...],
    site: Site,
    path: Path,
) -> None:
    """Write the page of one notebook."""
    (before, last), (after, next_one) = beside
    ways = {"before": (before, f"←\u00a0{last}"), "contents": ("index", "Contents")}
    ways["after"] = (after, f"{next_one}\u00a0→")
    navigation = "".join(
        f'<a class="{kind}" href="{to}.html">{html.escape(text)}</a>'
        for kind, (to, text) in ways.items()
        if to
    )
    made = edition(notebook, HTML, Path(meta["root"]))
    forms = site.forms(notebook.id) if notebook.number else ""
    title = html.escape(notebook.headline)
    words = {"pagetitle": title, "heading": title, "forms": forms, "nav": navigation}
    _write(path, [made], meta, words | {"series": html.escape(series)})


def index(
    notebooks: list[Notebook],
    series: str,
    about: list[dict],
    meta: dict,
    site: Site,
    path: Path,
) -> None:
    """Write the page that leads to all forms of all notebooks; `about` is its first words."""
    chapters = ""
    for n in notebooks:
        part = PARTS.get(n.id[3:], "" if chapters else "Notebooks")
        if part:
            chapters += "</ol>" if chapters else ""
            chapters += f"<h2>{html.escape(part)}</h2><ol>"
        chapters += (
            f'<li><h3><a href="{n.id}.html">{html.escape(n.headline)}</a> '
            f'<span class="time">{n.minutes} min</span></h3>'
            f"<p>{_code(n.question)}</p>"
            f'<p class="forms">{site.forms(n.id)}</p></li>'
        )
    found = [[n.id, n.headline, *section] for n in notebooks for section in _sections(n)]
    data = json.dumps(found, ensure_ascii=False).replace("<", "\\u003c")
    archive = {"All notebooks": "notebooks.zip"} if site.hosted else {}
    words = {"chapters": chapters, "books": site.links(BOOKS | archive), "sections": data}
    words["script"] = (ROOM / "search.js").read_text(encoding="utf-8")
    words["index-style"] = (ROOM / "index.css").read_text(encoding="utf-8")
    head = [raw(f"<h1>{html.escape(series)}</h1>", "html")]
    place = div("chapter", [*head, *about], id="index", file="README.md", folder=".")
    _write(
        path, [place], meta, words | {"pagetitle": "Contents", "series": html.escape(series)}
    )


def _code(markdown: str) -> str:
    """A question as HTML: its only mark is that of code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(markdown))


def _write(path: Path, blocks: list[dict], meta: dict, words: dict[str, str]) -> None:
    """Fill the template of a page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if any(element["t"] == "Math" for element in elements(blocks)):
        font = (ROOM / "fonts" / "math.woff").read_bytes()  # for many a phone has none
        words = words | {"math-font": base64.b64encode(font).decode()}
    ready = {
        key: {"t": "MetaBlocks", "c": [raw(text, "html")]} for key, text in words.items()
    }
    convert.written(
        blocks,
        meta | ready,
        *("-t", "html5", "-o", path, "--mathml", "--template", ROOM / "page.html"),
        *("--toc", "--toc-depth=3"),
    )
