"""The web pages: one self-contained file a notebook, and an index of everything."""

import base64
import html
import re
from pathlib import Path

from handouts import convert
from handouts.editions import HTML, block, edition
from handouts.notebook import Notebook

ROOM = Path(__file__).parent
MIME = {
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".gif": "image/gif",
}
PICTURE = re.compile(r'src="([0-9a-f]{16}\.\w+)"')
FORMS = {
    "read": "{0}.html",
    "student": "../student/{0}.pdf",
    "instructor": "../instructor/{0}.pdf",
    "slides": "../slides/{0}.pdf",
    "notes": "../slides/{0}_notes.pdf",
}


def entries(notebooks: list[Notebook], root: Path) -> list[tuple[str, str, int, str]]:
    """For each notebook its id, headline, minutes, and what it teaches after the README."""
    readme = root / "README.md"
    table = readme.read_text(encoding="utf-8") if readme.exists() else ""
    found = []
    for n in notebooks:
        row = re.search(rf"^\|.*\]\(notebooks/{re.escape(n.path.name)}\).*$", table, re.M)
        teaches = row[0].strip("| ").split(" | ")[-1] if row else ""
        found.append((n.id, n.headline, n.minutes, teaches))
    return found


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
        f'<a href="{i}.html">{arrow.format(html.escape(title))}</a>' if i else ""
        for (i, title), arrow in zip(beside, ("← {}", "{} →"), strict=True)
    )
    navigation = f'{before}<a href="index.html">Contents</a>{after}'
    heading = ("-V", f"heading={html.escape(notebook.headline)}")
    blocks = edition(notebook, HTML)
    _write(path, blocks, meta, notebook.headline, series, navigation, media, *heading)


def index(entries: list[tuple], series: str, media: Path, path: Path) -> None:
    """Write the page that leads to all forms of all notebooks."""
    rows = "".join(
        "<tr>"
        + f'<td><a href="{i}.html"><b>{html.escape(title)}</b></a></td>'
        + f"<td class='time'>{minutes} min</td><td>{html.escape(teaches)}</td>"
        + "<td class='forms'>"
        + " ".join(f'<a href="{to.format(i)}">{name}</a>' for name, to in FORMS.items())
        + "</td></tr>"
        for i, title, minutes, teaches in entries
    )
    text = (
        f"<h1>{html.escape(series)}</h1>"
        "<p>In reading order. Each notebook as a page to <i>read</i> here, as a PDF to print "
        "for <i>student</i> (room for predictions, no solutions) and <i>instructor</i> "
        "(solutions, timing, notes), as <i>slides</i>, and as slides with the speaker's "
        "<i>notes</i>.</p>"
        "<table><thead><tr><th>notebook</th><th>time</th><th>it teaches</th>"
        f"<th>forms</th></tr></thead><tbody>{rows}</tbody></table>"
        '<p>All of them in one: <a href="../student/book.pdf">student\'s book</a>, '
        '<a href="../instructor/book.pdf">instructor\'s book</a>. '
        'How to run the notebooks: <a href="readme.html">README</a>.</p>'
    )
    meta = {"file": "README.md", "folder": "", "id": "index", "chapter": "", "root": ""}
    meta |= {"slides": False, "links": []}
    _write(path, [block("raw", text, "index")], meta, "Contents", series, "", media)


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
    path.write_text(PICTURE.sub(lambda found: _inside(media / found[1]), text), "utf-8")


def _inside(file: Path) -> str:
    """The source of an image as the image itself, so that the page needs no other file."""
    data = base64.b64encode(file.read_bytes()).decode()
    return f'src="data:{MIME[file.suffix]};base64,{data}"'
