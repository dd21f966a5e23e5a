"""The web pages: one self-contained file a notebook, and an index with a search."""

import base64
import json
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from urllib.parse import quote

from handouts import convert
from handouts.editions import edition
from handouts.forms import HTML, Book, Screen, in_page, parts_of, raw, sizes
from handouts.notebook import Notebook, elements, slug, stringify

HEADING = re.compile(r'(<h([23])[^>]* id="([^"]+)">.*?)(</h\2>)', re.S)
HERE = r"<a class='here' href='#\3' aria-label='Link to this section'>#</a>"
BRANCH = "gh-pages"  # where `make publish` puts the site, the copies with it
FORMS = {
    "PDF for students": "student/{0}.pdf",
    "for instructors": "instructor/{0}.pdf",
    "slides in the browser": "slides/{0}.html",
    "slides for JupyterLab (.zip)": "slides/{0}.zip",
    "notebook (.ipynb)": "notebooks/{0}.ipynb",
    "with open predictions (.ipynb)": "open/{0}.ipynb",
}
SAVED = {"open": "_open"}  # what a file's name gets, by its folder
BOOKS = {
    "Student's book": "student/book.pdf",
    "Instructor's book": "instructor/book.pdf",
    "EPUB": "book.epub",
    "All notebooks": "notebooks.zip",
}


def doors(repository: str, stem: str) -> dict[str, str]:
    """The addresses that open a notebook elsewhere, by name."""
    if not repository:
        return {}
    copied = f"{repository}/blob/{BRANCH}/doors/{stem}.ipynb"
    source = quote(f"https://github.com/{copied}", safe="")
    binder = f"https://mybinder.org/v2/gh/{repository}/HEAD?urlpath=lab/tree/notebooks/"
    return {
        "Binder": f"{binder}{stem}.ipynb",
        "Colab": f"https://colab.research.google.com/github/{copied}",
        "Kaggle": f"https://www.kaggle.com/kernels/welcome?src={source}",
        "Codespaces": f"https://codespaces.new/{repository}",
    }


def _forms(book: Book, name: str) -> list[dict]:
    """Links to all forms of a notebook."""
    ways = {f"open in {label}": to for label, to in doors(book.github, name).items()}
    return _links(FORMS, name) + _links(ways)


def _links(targets: dict[str, str], name: str = "") -> list[dict]:
    """Links; a notebook is saved under a name that says which form it is."""
    links = []
    for label, to in targets.items():
        links.append({"name": label, "to": to.format(name)})
        if to.endswith("/{0}.ipynb"):
            more = SAVED.get(to.partition("/")[0], "")
            links[-1]["save"] = f"{name}{more}.ipynb"
    return links


def _sections(notebook: Notebook) -> Iterator[tuple[str, str, str]]:
    """Each heading with its anchor and the words under it, for the search."""
    title, anchor, words = notebook.headline, "", []
    for piece in notebook.pieces:
        if piece.kind == "heading" and piece.level > 1:
            yield title, anchor, " ".join(words)
            title, anchor, words = stringify(piece.blocks), slug(piece.text), []
        elif piece.kind in ("prose", "predict", "listing") and not piece.role:
            words += map(stringify, filter(_is_text, elements(piece.blocks)))
        elif piece.kind == "code" and not piece.role:
            words.append(" ".join(piece.text.split()))
    yield title, anchor, " ".join(words)


def _is_text(element: dict) -> bool:
    """A paragraph, a cell of a table or code: its words don't run into the next one's."""
    return element["t"] in ("Para", "Plain", "CodeBlock")


def page(notebook: Notebook, beside: list[tuple[str, str]], book: Book, path: Path) -> None:
    """Write the page of one notebook."""
    (before, last), (after, next_one) = beside
    ways = [
        {"kind": "before", "to": before, "text": f"←\u00a0{last}"},
        {"kind": "contents", "to": "index", "text": "Contents", "search": "yes"},
        {"kind": "after", "to": after, "text": f"{next_one}\u00a0→"},
    ]
    nav = [way for way in ways if way["to"]]
    forms = _forms(book, notebook.id) if notebook.number else []
    words = {"heading": notebook.headline, "series": book.series, "forms": forms, "nav": nav}
    prose = (p.blocks for p in notebook.pieces if p.kind == "prose")
    first = next((blocks for blocks in prose if blocks[0]["t"] == "Para"), [])
    words["said"] = notebook.question or stringify(first)
    body = edition(notebook, HTML, book)
    if notebook.path == book.root / "README.md":  # its title is that of all
        words |= {"heading": book.series, "series": ""}
        _halved(body)
    _write(path, body, words)


def index(
    notebooks: list[Notebook],
    documents: list[Notebook],
    about: list[dict],
    book: Book,
    path: Path,
) -> None:
    """Write the page that leads to all forms of all notebooks; `about` is its first words."""
    parts: list[dict] = []
    asked = convert.parsed([("markdown", n.question) for n in notebooks])
    for n, question in zip(notebooks, asked, strict=True):
        name, _ = book.parts.get(n.id, ("" if parts else "Notebooks", []))
        if name:
            parts.append({"name": name, "chapters": []})
        said = {"id": n.id, "headline": n.headline, "minutes": n.minutes}
        inlines = [e for block in question for e in block["c"][1][0]["c"]]
        said["question"] = {"t": "MetaInlines", "c": inlines}
        parts[-1]["chapters"].append(said | _glance(n, book))
    every = (*notebooks, *documents)
    found = [[n.id, n.headline, *section] for n in every for section in _sections(n)]
    data = json.dumps(found, ensure_ascii=False).replace("<", "\\u003c")
    made = Screen(HTML, "index", Path("README.md"), book).made(about)
    _halved(made)
    lead = [*takewhile(lambda block: block["t"] == "Para", made)]  # up to the picture
    words = {
        "heading": book.series,
        "lead": {"t": "MetaBlocks", "c": lead},
        "parts": parts,
        "start": notebooks[0].id if notebooks else "",
        "number": notebooks[0].number if notebooks else "",
        "total": _total(notebooks),
        "ways": _ways(book),
        "books": _links(BOOKS),
        "said": stringify(made[:1]),
        "sections": {"t": "MetaBlocks", "c": [raw(data, "html")]},
    }
    _write(path, made[len(lead) :], words)


def _halved(blocks: list[dict]) -> None:
    """The first picture that moves has two halves; a phone shows them under each other."""
    plains = (e["c"] for e in elements(blocks) if e["t"] == "Plain")
    for inlines in (plain for plain in plains if [e["t"] for e in plain] == ["Image"]):
        (name, classes, more), _, target = inlines[0]["c"]
        if "moves" in classes:
            again = [name, [*classes, "again"], [*more, ["role", "presentation"]]]
            inlines.append({"t": "Image", "c": [again, [], target]})
            return


def _total(notebooks: list[Notebook]) -> str:
    """How many chapters and hours; a test holds the hours to those of the README."""
    minutes = sum(n.minutes for n in notebooks)
    hours = round(minutes / 60)
    time = f"about {hours} hours" if hours > 1 else f"{minutes} minutes"
    return f"{len(notebooks)} chapters, {time}"


def _ways(book: Book) -> list[dict]:
    """Where the README says how to run it, and the routes, where there are such pages."""
    said = {
        "run it: two commands": ("README.md", "two-commands"),
        "routes for a day, a week, a semester": ("docs/path.md", "three-ways-through"),
    }
    ways = {}
    for words, (file, anchor) in said.items():
        page, anchors = book.targets.get(file, ("", set()))
        if anchor in anchors:
            ways[words] = f"{page}.html#{anchor}"
    return _links(ways)


def _glance(notebook: Notebook, book: Book) -> dict[str, str]:
    """A chapter's first film, in its middle, or else its first picture."""
    films = ([e for e in elements(p.blocks) if e["t"] == "Figure"] for p in notebook.pieces)
    files = [parts_of(film[len(film) // 2])[0]["c"][2][0] for film in films if film]
    files += [piece.text for piece in notebook.pieces if piece.kind == "image"]
    if not files:
        return {}
    return {"picture": in_page(book, files[0]), "style": sizes(book, files[0])}


def _write(path: Path, body: list[dict], words: dict) -> None:
    """Fill the template of a page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if any(element["t"] == "Math" for element in elements(body)):
        font = convert.ROOM / "fonts" / "math.woff"  # many a phone has none
        words = words | {"math-font": base64.b64encode(font.read_bytes()).decode()}
    form = ("-t", "html5", "--mathml", "--template", convert.ROOM / "page.html")
    made = convert.pandoc(body, *form, "--toc", "--toc-depth=3", **words)
    made = re.sub(r"<th([^>]*)></th>", r"<td\1></td>", made)  # a header that says nothing
    made = HEADING.sub(rf"\1{HERE}\4", made)
    path.write_text(made, encoding="utf-8")
