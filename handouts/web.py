"""The web pages: one self-contained file a notebook, and an index with a search."""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from handouts import convert
from handouts.doors import doors
from handouts.editions import edition
from handouts.forms import HTML, Book, Screen, raw
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
    "step_time": "All together",
}


@dataclass(frozen=True)
class Site:
    """Where the pages stand beside the other forms, and what else is beside them."""

    pages: str = "html"
    base: str = "../"  # from a page to the other forms
    hosted: bool = False  # with the notebooks to download
    github: str = ""  # the repository, for the ways to open a notebook elsewhere

    def links(self, targets: dict[str, str], name: str = "") -> list[dict]:
        """Links to files beside the pages."""
        return [
            {"name": label, "to": self.base + to.format(name)}
            for label, to in targets.items()
        ]

    def forms(self, name: str) -> list[dict]:
        """Links to all forms of a notebook."""
        ways = doors(self.github, name)
        opened = [{"name": f"open in {label}", "to": to} for label, to in ways.items()]
        return self.links(FORMS | (COPIES if self.hosted else {}), name) + opened


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
    book: Book,
    series: str,
    beside: tuple[tuple[str, str], ...],
    site: Site,
    path: Path,
) -> None:
    """Write the page of one notebook."""
    (before, last), (after, next_one) = beside
    ways = [
        {"kind": "before", "to": before, "text": f"←\u00a0{last}"},
        {"kind": "contents", "to": "index", "text": "Contents"},
        {"kind": "after", "to": after, "text": f"{next_one}\u00a0→"},
    ]
    words = {
        "pagetitle": notebook.headline,
        "heading": notebook.headline,
        "series": series,
        "forms": site.forms(notebook.id) if notebook.number else [],
        "nav": [way for way in ways if way["to"]],
    }
    _write(path, edition(notebook, HTML, book), words)


def index(
    notebooks: list[Notebook],
    series: str,
    about: list[dict],
    book: Book,
    site: Site,
    path: Path,
) -> None:
    """Write the page that leads to all forms of all notebooks; `about` is its first words."""
    parts: list[dict] = []
    asked = convert.parsed([("markdown", n.question) for n in notebooks])
    for n, question in zip(notebooks, asked, strict=True):
        if name := PARTS.get(n.id[3:], "" if parts else "Notebooks"):
            parts.append({"name": name, "chapters": []})
        said = {"id": n.id, "headline": n.headline, "minutes": n.minutes}
        inlines = [e for block in question for e in block["c"][1][0]["c"]]
        said["question"] = {"t": "MetaInlines", "c": inlines}
        parts[-1]["chapters"].append(said | {"forms": site.forms(n.id)})
    found = [[n.id, n.headline, *section] for n in notebooks for section in _sections(n)]
    data = json.dumps(found, ensure_ascii=False).replace("<", "\\u003c")
    words = {
        "pagetitle": "Contents",
        "heading": series,
        "series": series,
        "parts": parts,
        "books": site.links(
            BOOKS | ({"All notebooks": "notebooks.zip"} if site.hosted else {})
        ),
        "sections": {"t": "MetaBlocks", "c": [raw(data, "html")]},
    }
    _write(path, Screen(HTML, "index", Path("README.md"), book).made(about), words)


def _write(path: Path, body: list[dict], words: dict) -> None:
    """Fill the template of a page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if any(element["t"] == "Math" for element in elements(body)):
        font = (ROOM / "fonts" / "math.woff").read_bytes()  # for many a phone has none
        words = words | {"math-font": base64.b64encode(font).decode()}
    options = ("-t", "html5", "-o", path, "--mathml", "--template", ROOM / "page.html")
    convert.pandoc(body, *options, "--toc", "--toc-depth=3", **words)
