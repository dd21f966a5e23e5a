"""Build the handouts from the stored outputs: `make handouts`, or python -m handouts [03 …].

    build/student/NN_stem.pdf      without solutions, with room to write predictions
    build/instructor/NN_stem.pdf   with solutions, timing and teaching notes
    build/*/book.pdf               all of them in one
    build/slides/NN_stem.ipynb     live slides for JupyterLab: slides.py
    build/book.epub                all of them for an electronic reader, with solutions
    build/html/index.html          one self-contained page a notebook, and where to find all

pandoc makes Typst text and web pages, then Typst makes the PDFs, each in as many processes as
there are cores.
"""

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from tqdm import tqdm

from handouts import convert, slides, web
from handouts.convert import Unprintable
from handouts.editions import edition
from handouts.forms import EPUB, INSTRUCTOR, STUDENT, Book, typst
from handouts.notebook import ROOT, Notebook, chosen, read, read_text

EDITIONS = {STUDENT: "Student's edition", INSTRUCTOR: "Instructor's edition"}
RIGHTS = "Text and figures: CC BY 4.0. Code: MIT."
LINK = re.compile(r"\]\(([^)#]+\.md)")
Job = tuple[Callable, tuple, Path]  # a function that makes a file, its arguments, the file


def build(
    out: Path,
    names: tuple = (),
    folder: Path = ROOT / "notebooks",
    site: web.Site | None = None,
) -> list[str]:
    """Build everything for the notebooks of `folder` whose names begin so, or for all.

    Returns a line for each PDF, with its pages. Raises Unprintable with a line for each
    fault, which begins with its place.
    """
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        plan = Plan(out, names, folder, site or web.Site())
        _run(pool, list(plan.texts()), "text")
        pages = _run(pool, list(plan.pdfs()), "PDF")
    return [f"{name:50} {count:4} pages" for name, count in sorted(pages.items())]


def _run(pool, jobs: list[Job], what: str) -> dict[str, int]:
    """Make the files; returns what was said of each."""
    waiting = {pool.submit(make, *given, path): path for make, given, path in jobs}
    made, problems = {}, []
    for future in tqdm(as_completed(waiting), what, len(jobs), unit="file", disable=None):
        path = waiting[future]
        try:
            made[f"{path.parent.name}/{path.name}"] = future.result()
        except Unprintable as problem:
            problems += str(problem).split("\n")
    if problems:
        raise Unprintable("\n".join(dict.fromkeys(problems)))
    return made


class Plan:
    """What is to be made, from which notebooks, and how they refer to each other."""

    def __init__(self, out: Path, names: tuple, folder: Path, site: web.Site) -> None:
        self.out, self.work, self.root, self.site = out, out / ".work", folder.parent, site
        convert.prepare(self.work)
        media = self.work / "media"
        every = [read(path, media) for path in chosen(folder)]
        wanted = chosen(folder, names)
        self.notebooks = [n for n in every if n.path in wanted]
        if not wanted:
            raise Unprintable(
                f"{folder}: no notebook's name begins with {' or '.join(names)}"
            )
        self.documents = [
            read_text(name, path, media) for path, name in _linked(every, self.root).items()
        ]
        targets = {
            n.path.relative_to(self.root).as_posix(): (n.id, n.anchors())
            for n in (*every, *self.documents)
        }
        self.book = Book(self.root, media, targets)
        self.series, self.about = "Handouts", []
        if self.documents:  # the first of them gives the book its title
            first = self.documents[0]
            self.series = first.title
            prose = takewhile(lambda piece: piece.kind != "heading", first.pieces[1:])
            self.about = [block for piece in prose for block in piece.blocks]
            head = first.pieces[0]
            named = [{"t": "Header", "c": [1, ["", [], []], [{"t": "Str", "c": first.id}]]}]
            first.pieces[0] = replace(head, text=first.id, blocks=named)
        self.parts = [*self.notebooks, *self.documents]

    def texts(self) -> Iterator[Job]:
        """The first step: Typst text of each edition of each notebook, and what is no PDF."""
        yield epub, (self.parts, self.series, self.book), self.out / "book.epub"
        for n in self.parts:
            for name in EDITIONS:
                yield paper_text, (n, name, self.book), self.work / name / f"{n.id}.body.typ"
        for n in self.notebooks:
            folder = self.out / "slides"
            yield slides.write_one, (n.path,), folder / n.path.name
        yield from self.pages()

    def pages(self) -> Iterator[Job]:
        """The web pages."""
        folder = self.out / self.site.pages
        for i, n in enumerate(self.parts):
            beside = web.neighbours(self.notebooks, i)
            given = (n, self.book, self.series, beside, self.site)
            yield web.page, given, folder / f"{n.id}.html"
        given = (self.notebooks, self.series, self.about, self.book, self.site)
        yield web.index, given, folder / "index.html"

    def pdfs(self) -> Iterator[Job]:
        """The second step: the books, which take longest, then the PDFs of one notebook."""
        for name in EDITIONS:
            yield self._pdf(name, self.parts, "book")
        for n in self.notebooks:
            for name in EDITIONS:
                yield self._pdf(name, [n], n.id)

    def _pdf(self, name: str, parts: list[Notebook], file: str) -> Job:
        """A Typst text that includes those of the parts, after what stands in front."""
        form, series = typst(EDITIONS[name]), typst(self.series)
        title = series if file == "book" else typst(parts[0].headline)
        opening = f"#opening({series}, {form})\n"
        if file == "book":
            opening = f"#title-page({series}, {form}, [{self._made()}])\n#contents()\n"
        lines = [f'#import "/paper.typ": *\n#show: paper.with({title}, {form})\n{opening}']
        for part in parts:
            if file == "book":
                lines.append("#pagebreak(weak: true)")
            if part is next(iter(self.documents), None):
                lines.append("#appendix()")
            lines.append(f'#include "/{name}/{part.id}.body.typ"')
        source = self.work / name / f"{file}.typ"
        source.write_text("\n".join(lines), encoding="utf-8")
        inputs = {"here": ",".join(part.id for part in parts), "edition": name}
        return convert.pdf, (source, self.work, inputs), self.out / name / f"{file}.pdf"

    def _made(self) -> str:
        file = self.root / "constraints.txt"
        pins = file.read_text(encoding="utf-8") if file.exists() else ""
        torch = re.search(r"^torch==([\d.]+)", pins, re.M)
        return f"Every output was made with PyTorch {torch[1]}." if torch else ""


def _linked(notebooks: list[Notebook], root: Path) -> dict[Path, str]:
    """The pages of text that the notebooks speak of, with a name: they come as appendices."""
    texts = [(n.path.parent, piece.text) for n in notebooks for piece in n.pieces]
    links = [(home / link).resolve() for home, text in texts for link in LINK.findall(text)]
    found = sorted(p for p in {*links} if p.is_file() and p.is_relative_to(root))
    of_folder = {path: path.stem == "README" and path.parent != root for path in found}
    return {p: (p.parent.name if of_folder[p] else p.stem).lower() for p in found}


def paper_text(notebook: Notebook, name: str, book: Book, path: Path) -> None:
    """The Typst text of an edition of a notebook."""
    body = convert.pandoc(edition(notebook, name, book), "-t", "typst")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('#import "/paper.typ": *\n' + body, encoding="utf-8")


def epub(parts: list[Notebook], series: str, book: Book, path: Path) -> None:
    """One electronic book of all chapters, with their solutions."""
    convert.pandoc(
        [block for part in parts for block in edition(part, EPUB, book)],
        *("-t", "epub3", "-o", path, "--split-level=1", "--toc-depth=2", "--mathml"),
        *("--css", convert.ROOM / "epub.css", "--resource-path", book.media),
        *("-V", "lang=en", "--metadata", f"title={series}", "--metadata", f"rights={RIGHTS}"),
    )
