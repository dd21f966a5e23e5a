"""The web pages: one self-contained file a notebook, and an index with a search."""

import base64
import html
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from handouts import convert
from handouts.editions import HTML, block, edition
from handouts.notebook import Notebook, slug

ROOM = Path(__file__).parent
MIME = {
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".gif": "image/gif",
}
PICTURE = re.compile(r'src="([0-9a-f]{16}\.\w+)"')
FORMS = {
    "PDF for students": "../student/{0}.pdf",
    "for instructors": "../instructor/{0}.pdf",
    "slides": "../slides/{0}.pdf",
    "speaker's notes": "../slides/{0}_notes.pdf",
}
BOOKS = {
    "Student's book": "../student/book.pdf",
    "Instructor's book": "../instructor/book.pdf",
    "EPUB": "../book.epub",
}
PARTS = {  # by the chapter that each begins with
    "processes_and_ranks": "Messages",
    "data_partitioning": "The batch is shared",
    "sharding": "The model is shared",
    "at_scale": "All together",
}
ARROWS = {"before": "←\u00a0{}", "after": "{}\u00a0→"}
DOORS = "<!-- doors -->"  # where a site says how to open the notebook elsewhere


@dataclass(frozen=True)
class Entry:
    """A notebook on the index: its id, headline, minutes, what it answers, its sections."""

    id: str
    headline: str
    minutes: int
    answers: str
    sections: tuple[tuple[str, str, str], ...]  # title, anchor, words

    @property
    def part(self) -> str:
        return PARTS.get(self.id[3:], "")


def entries(notebooks: list[Notebook], root: Path) -> list[Entry]:
    """What the index says of each notebook; the README knows what it answers."""
    readme = root / "README.md"
    table = readme.read_text(encoding="utf-8") if readme.exists() else ""
    found = []
    for n in notebooks:
        row = re.search(rf"^\|.*\]\(notebooks/{re.escape(n.path.name)}\).*$", table, re.M)
        said = row[0].strip("| ").split(" | ")[-1] if row else ""
        found.append(Entry(n.id, n.headline, n.minutes, said, tuple(_sections(n))))
    return found


def _sections(notebook: Notebook) -> Iterator[tuple[str, str, str]]:
    """Each heading with its anchor and the words under it, for the search."""
    title, anchor, words = notebook.headline, "", []
    for piece in notebook.pieces:
        if piece.kind == "heading" and piece.level > 1:
            yield title, anchor, " ".join(words)
            title, anchor, words = _plain(piece.text), slug(piece.text), []
        elif piece.kind in ("prose", "predict", "code", "listing") and not piece.role:
            words.append(_plain(piece.text))
    yield title, anchor, " ".join(words)


def _plain(markdown: str) -> str:
    """A text without the marks of markdown, on one line."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    return " ".join(re.sub(r"```\w*|[`*$]|<[^>]+>", "", text).split())


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
    media: Path,
    path: Path,
) -> None:
    """Write the page of one notebook."""
    before, after = (
        f'<a class="{side}" href="{i}.html">{arrow.format(html.escape(title))}</a>'
        if i
        else ""
        for (i, title), (side, arrow) in zip(beside, ARROWS.items(), strict=True)
    )
    navigation = f'{before}<a class="contents" href="index.html">Contents</a>{after}'
    forms = links(FORMS, notebook.id) + DOORS if notebook.number else ""
    heading = ("-V", f"heading={html.escape(notebook.headline)}", "-V", f"forms={forms}")
    blocks = edition(notebook, HTML)
    _write(path, blocks, meta, notebook.headline, series, navigation, media, *heading)


def doors_of(name: str) -> str:
    """The mark of one notebook on the index."""
    return DOORS.replace(" -", f" {name} -")


def links(targets: dict[str, str], name: str) -> str:
    """Links to the forms of a notebook, or to the books."""
    return " ".join(
        f'<a href="{to.format(name)}">{html.escape(label)}</a>'
        for label, to in targets.items()
    )


def index(
    entries: list[Entry], series: str, about: Sequence[str], media: Path, path: Path
) -> None:
    """Write the page that leads to all forms of all notebooks; `about` is its first words."""
    chapters = ""
    for entry in entries:
        if entry.part or not chapters:
            chapters += "</ol>" if chapters else ""
            chapters += f"<h2>{html.escape(entry.part or 'Notebooks')}</h2><ol>"
        question, mark, rest = entry.answers.partition("?")
        chapters += (
            f'<li><h3><a href="{entry.id}.html">{html.escape(entry.headline)}</a> '
            f'<span class="time">{entry.minutes} min</span></h3>'
            f"<p><b>{_code(question + mark)}</b>{_code(rest)}</p>"
            f'<p class="forms">{links(FORMS, entry.id)}{doors_of(entry.id)}</p></li>'
        )
    found = [
        [entry.id, entry.headline, *section]
        for entry in entries
        for section in entry.sections
    ]
    data = json.dumps(found, ensure_ascii=False).replace("<", "\\u003c")
    script = (ROOM / "search.js").read_text(encoding="utf-8")
    text = (
        f"<h1>{html.escape(series)}</h1>"
        + "".join(map(_paragraph, about))
        + '<search><form role="search" class="search"><label for="sought">Search all chapters'
        '</label> <input id="sought" type="search" autocomplete="off" disabled '
        'placeholder="all_reduce, deadlock, bucket …"></form></search>'
        '<div id="found" role="status" aria-live="polite"></div>'
        f"{chapters}</ol>"
        "<h2>To download, print and project</h2>"
        f'<p class="forms">{links(BOOKS, "")}<!-- downloads --></p>'
        "<p>A student's PDF has room for each prediction and no solutions, an instructor's "
        "has solutions, timing and notes. How to run the notebooks on your machine: "
        '<a href="readme.html">README</a>.</p>'
        f'<script id="sections" type="application/json">{data}</script>'
        f"<script>{script}</script>"
    )
    meta = {"file": "README.md", "folder": "", "id": "index", "chapter": "", "root": ""}
    meta |= {"slides": False, "links": []}
    style = ("-V", f"extra-style={(ROOM / 'index.css').read_text(encoding='utf-8')}")
    _write(path, [block("raw", text, "index")], meta, "Contents", series, "", media, *style)


def _paragraph(markdown: str) -> str:
    """A paragraph of the README's first screen: words, or its picture."""
    picture = re.fullmatch(r"!\[(.+)\]\((\S+)\)", markdown)
    if picture:
        return f'<p><img src="{picture[2]}" alt="{html.escape(picture[1])}"></p>'
    return f"<p>{html.escape(_plain(markdown))}</p>"


def _code(markdown: str) -> str:
    """A row of the README's table as HTML: its only mark is that of code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(markdown))


def _write(
    path: Path,
    blocks: list[dict],
    meta: dict,
    title: str,
    series: str,
    navigation: str,
    media: Path,
    *options: str,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = convert.pandoc(
        blocks,
        meta,
        *("-t", "html5", "--standalone", "--mathml", "--template", str(ROOM / "page.html")),
        *("--syntax-highlighting", str(ROOM / "html.theme"), "--toc", "--toc-depth=3"),
        *("-V", f"pagetitle={title}", "-V", f"series={series}", "-V", f"nav={navigation}"),
        *options,
    )
    text = reachable(PICTURE.sub(lambda found: _inside(media / found[1]), text))
    if "<math" in text:
        text = text.replace("<style>", f"<style>\n{_math_font()}\n", 1)
    path.write_text(text, encoding="utf-8")


def reachable(page: str) -> str:
    """The page for everybody: what scrolls sideways can be reached from the keyboard.

    A head of a table without words is no head, and a rank's colour is a bar beside its name,
    for some of the colours are too pale for words.
    """
    page = COLOURED.sub(r'<b style="border-left:0.5em solid \1;padding-left:0.4em">', page)
    page = re.sub(r"<th([^>]*)></th>", r"<td\1></td>", page)
    page = page.replace('<div style="overflow-x:auto">', "<div>")  # the lab's own box
    page = page.replace("<table", f"{WIDE}<table").replace("</table>", "</table></div>")
    page = re.sub(
        r'<math display="block".*?</math>', rf"{FORMULA}\g<0></span>", page, flags=re.S
    )
    page = INLINE.sub(r'<span class="with-math">\1</span>', page)
    page = re.sub(r"<code>([^<]{1,26})</code>", r'<code class="short">\1</code>', page)
    page = re.sub(r"(?<!<p>)(<img [^>]*>)(?=\s*<figcaption|</figure>)", PICTURED, page)
    return re.sub(r"<pre(?! tabindex)\b", '<pre tabindex="0"', page)


COLOURED = re.compile(r'<b style="color:(#\w+)">')
FORMULA = '<span class="formula" tabindex="0" role="group" aria-label="formula">'
INLINE = re.compile(r'(<math display="inline"(?:(?!</math>).)*</math>[.,;:)]+)', re.S)
PICTURED = r'<div class="picture" tabindex="0" role="group" aria-label="picture">\1</div>'
WIDE = '<div class="wide" tabindex="0" role="group" aria-label="table">'


@cache
def _math_font() -> str:
    """The font of formulas, for many a phone has none."""
    data = base64.b64encode((ROOM / "fonts" / "math.woff").read_bytes()).decode()
    source = f'url("data:font/woff;base64,{data}") format("woff")'
    return f'@font-face {{ font-family: "Course Math"; src: {source}; }}'


def _inside(file: Path) -> str:
    """The source of an image as the image itself, so that the page needs no other file."""
    data = base64.b64encode(file.read_bytes()).decode()
    return f'src="data:{MIME[file.suffix]};base64,{data}"'
