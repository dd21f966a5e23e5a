"""Build the handouts from the stored outputs: `make handouts`, or python -m handouts [03 …].

    build/student/NN_stem.pdf      without solutions, with room to write predictions
    build/instructor/NN_stem.pdf   with solutions, timing and teaching notes
    build/*/book.pdf               all of them in one
    build/slides/NN_stem.ipynb     live slides for JupyterLab, .html without it: slides.py
    build/open/NN_stem.ipynb       the notebook with open predictions: student.py
    build/book.epub                all of them for an electronic reader, with solutions
    build/index.html               one self-contained page a notebook, and where to find all

pandoc makes Typst text and web pages, then Typst the PDFs, in as many processes as cores.
"""

import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import dropwhile, islice, repeat, takewhile
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

from handouts import convert, slides, student, web
from handouts.convert import Unprintable
from handouts.editions import edition
from handouts.forms import EPUB, INSTRUCTOR, STUDENT, Book, heading, typst, words
from handouts.notebook import ROOT, Notebook, Piece, chosen, elements, read, slug, stringify

EDITIONS = {STUDENT: "Student's edition", INSTRUCTOR: "Instructor's edition"}
RIGHTS = "Text and figures: CC BY 4.0. Code: MIT."
APPENDIX = "#show heading.where(level: 2): set heading(outlined: false, bookmarked: true)"
INNER = APPENDIX.replace("2", "1")  # for pages that another one lists
PART = re.compile(r"\*\*([IV]+ [^*]+)\*\*[^\n]*\n\|[^\n]*?\]\(notebooks/(\w+)\.ipynb")
LINK = re.compile(r"\]\(([^)#]+\.md)")
Job = tuple[Callable, tuple, Path]  # a function that makes a file, its arguments, the file


def build(
    out: Path, names: tuple = (), folder: Path = ROOT / "notebooks", github: str = ""
) -> list[str]:
    """Build everything for the notebooks of `folder` whose names begin so, or for all.

    Returns a line for each PDF, with its pages. Raises Unprintable with a line for each
    fault, which begins with its place.
    """
    fresh = get_context("forkserver")  # a fork of what has run Typst hangs
    with ProcessPoolExecutor(os.cpu_count(), fresh) as pool:
        plan = Plan(out, names, folder, github)
        _run(pool, list(plan.texts()), "text")
        pages = _run(pool, list(plan.pdfs()), "PDF")
    with zipfile.ZipFile(out / "notebooks.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        (out / "notebooks").mkdir(exist_ok=True)
        for path in chosen(folder, names):
            shutil.copyfile(path, out / "notebooks" / path.name)
            for form in ("notebooks", "open"):
                archive.write(out / form / path.name, f"{form}/{path.name}")
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

    def __init__(self, out: Path, names: tuple, folder: Path, github: str = "") -> None:
        self.out, self.work, self.root = out, out / ".work", folder.parent
        convert.prepare(self.work)
        media = self.work / "media"
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each waits for its pandoc
            every = list(pool.map(read, chosen(folder), repeat(media)))
        wanted = chosen(folder, names)
        self.notebooks = [n for n in every if n.path in wanted]
        if not wanted:
            raise Unprintable(
                f"{folder}: no notebook's name begins with {' or '.join(names)}"
            )
        linked = _linked(every, self.root)
        self.documents = [read(path, media, name) for path, name in linked.items()]
        self.documents.sort(key=lambda document: document.path != self.root / "README.md")
        others = sorted({*(self.root / "docs").glob("*.md")} - {*linked})
        self.others = [read(path, media) for path in others]  # of use on the site alone
        pins = (self.root / "constraints.txt").read_text("utf-8")
        torch = re.search(r"^torch==([\d.]+)", pins, re.M)[1]
        self.made = f"Every output was made with PyTorch {torch}."
        readme = self.documents[0]  # it gives the book its title
        targets = _targets([*every, *self.documents], self.root)
        self.book = Book(self.root, media, targets, readme.title, github)
        self.book.author, self.book.date = _cited(self.root)
        self.site = replace(self.book, targets=targets | _targets(self.others, self.root))
        drawn = [
            e["c"] for p in readme.pieces for e in elements(p.blocks) if e["t"] == "Image"
        ]
        if drawn:  # the last stands on the cover
            self.book.picture = drawn[-1][2][0], stringify(drawn[-1][1])
        about = list(takewhile(lambda piece: piece.kind != "heading", readme.pieces[1:]))
        if not any(map(_pictured, about)):  # the first picture, and the sentence below it
            about += islice(dropwhile(lambda p: not _pictured(p), readme.pieces), 2)
        self.about = [block for piece in about for block in piece.blocks]
        title = "About this collection"
        named = {"text": title, "blocks": [heading(1, words(title))]}
        readme.pieces[0] = replace(readme.pieces[0], **named)
        self.parts = [*self.notebooks, *self.documents]
        begun = {name: part for part, name in PART.findall(_text(self.root / "README.md"))}
        if begun:  # the first of each part and of the appendix, with its name
            begun[readme.id] = "Appendix"
        for n in self.parts:
            if n.id in begun:
                self.book.parts[n.id] = begun[n.id], []
            if self.book.parts:
                *_, (_, chapters) = self.book.parts.values()
                chapters += [(n.id, n.headline)] * (not _is_inner(n))

    def texts(self) -> Iterator[Job]:
        """The first step: Typst text of each edition of each notebook, and what is no PDF."""
        yield epub, (self.parts, self.book), self.out / "book.epub"
        for n in self.parts:
            for name in EDITIONS:
                yield paper_text, (n, name, self.book), self.work / name / f"{n.id}.body.typ"
        for n in self.notebooks:
            yield slides.write_one, (n, self.book.media), self.out / "slides" / n.path.name
            yield student.write_one, (n,), self.out / "open" / n.path.name
        yield from self.pages()

    def pages(self) -> Iterator[Job]:
        """The web pages."""
        heads = [("", ""), *((n.id, n.headline) for n in self.notebooks), ("", "")]
        for i, n in enumerate([*self.parts, *self.others]):
            beside = heads[i : i + 3 : 2] if n.number else heads[:1] * 2
            yield web.page, (n, beside, self.site), self.out / f"{n.id}.html"
        given = (self.notebooks, [*self.documents, *self.others], self.about, self.site)
        yield web.index, given, self.out / "index.html"

    def pdfs(self) -> Iterator[Job]:
        """The second step: the books, which take longest, then the PDFs of one notebook."""
        for name in EDITIONS:
            yield self._pdf(name, self.parts, "book")
        for n in self.notebooks:
            for name in EDITIONS:
                yield self._pdf(name, [n], n.id)

    def _pdf(self, name: str, parts: list[Notebook], file: str) -> Job:
        """A Typst text that includes those of the parts, after what stands in front."""
        form, series = typst(EDITIONS[name]), typst(self.book.series)
        title, front = typst(parts[0].headline), f"#opening({series}, {form})"
        if file == "book":
            lines = typst([each for each in (self.book.date, RIGHTS, self.made) if each])
            title, front = series, f"{_cover(self.book, EDITIONS[name], lines)}\n#contents()"
        lines = ['#import "/paper.typ": *', f"#show: paper.with({title}, {form})", front]
        for part in parts:
            lines += ["#pagebreak(weak: true)"] * (file == "book")
            lines += [APPENDIX] * (part is self.documents[0])
            if file == "book" and part.id in self.book.parts:
                lines += [f"#part{typst(self.book.parts[part.id])}", "#pagebreak()"]
            body = f'#include "/{name}/{part.id}.body.typ"'
            lines += [f"#[{INNER}\n{body}]" if _is_inner(part) else body]
        source = self.work / name / f"{file}.typ"
        source.write_text("\n".join(lines), encoding="utf-8")
        inputs = {"here": ",".join(part.id for part in parts), "edition": name}
        return convert.pdf, (source, self.work, inputs), self.out / name / f"{file}.pdf"


def _pictured(piece: Piece) -> bool:
    return any(element["t"] == "Image" for element in elements(piece.blocks))


def _is_inner(notebook: Notebook) -> bool:
    """Whether its folder has an index that lists it: the contents do not."""
    folder = notebook.path.parent
    return folder.parent.name == "docs" and notebook.path.name != "README.md"


def _text(file: Path) -> str:
    return file.read_text("utf-8") if file.is_file() else ""


def _targets(notebooks: list[Notebook], root: Path) -> dict[str, tuple[str, set[str]]]:
    """What a link to a file leads to: its page, and the anchors there."""
    files = (n.path.relative_to(root).as_posix() for n in notebooks)
    return {file: (n.id, n.anchors()) for file, n in zip(files, notebooks, strict=True)}


def _cited(root: Path) -> tuple[str, str]:
    """The authors and the date of CITATION.cff, where there is one."""
    file = root / "CITATION.cff"
    text = _text(file)
    found = (re.search(p, text) for p in (r"- name: (.+)", r'date-released: "?([\d-]+)'))
    author, date = (each[1] if each else "" for each in found)
    return author, date


def _cover(book: Book, edition: str, lines: str) -> str:
    """The Typst text of a title page."""
    file, alt = book.picture
    given = ", ".join(map(typst, (book.series, edition, book.author, file, alt)))
    return f"#title-page({given}, {lines})"


def _linked(notebooks: list[Notebook], root: Path) -> dict[Path, str]:
    """The pages of text that the notebooks speak of, with a name: they come as appendices."""
    texts = [(n.path.parent, piece.text) for n in notebooks for piece in n.pieces]
    links = {(home / link).resolve() for home, text in texts for link in LINK.findall(text)}
    links |= {root / "README.md", root / "docs" / "path.md"}  # the index leads to both
    links |= set((root / "docs" / "zoo").glob("*.md"))  # all of it, as its index does
    found = sorted(p for p in links if p.is_file() and p.is_relative_to(root))
    named = [p.parent if p.stem == "README" and p.parent != root else p for p in found]
    return {p: place.stem.lower() for p, place in zip(found, named, strict=True)}


def paper_text(notebook: Notebook, name: str, book: Book, path: Path) -> None:
    """The Typst text of an edition of a notebook."""
    body = convert.pandoc(edition(notebook, name, book), "-t", "typst")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('#import "/paper.typ": *\n' + body, encoding="utf-8")


def epub(parts: list[Notebook], book: Book, path: Path) -> None:
    """One electronic book of all chapters, with their solutions, a cover and its licence."""
    cover = book.media / "cover.typ"
    page = _cover(book, "With solutions", "()")
    cover.write_text(f'#import "/paper.typ": *\n#show: cover\n{page}', encoding="utf-8")
    image = convert.png(cover, book.media.parent)
    said = {"title": book.series, "rights": RIGHTS, "creator": book.author, "date": book.date}
    blocks: list[dict] = []
    for part in parts:
        made, inside = edition(part, EPUB, book), bool(book.parts)
        if part.id in book.parts:  # its chapters stand under it
            name = book.parts[part.id][0]
            blocks.append(heading(1, words(name), slug(name), "part"))
        for header in (e for e in elements(made) if inside and e["t"] == "Header"):
            header["c"][0] += 1 + _is_inner(part)
        blocks += made
    depth = 2 if book.parts else 1
    convert.pandoc(
        blocks,
        *("-t", "epub3", "-o", path, f"--split-level={depth}", f"--toc-depth={depth + 1}"),
        "--mathml",
        *("--css", convert.ROOM / "epub.css", "--resource-path", book.media, "-Vlang=en"),
        *(f"--metadata={name}={text}" for name, text in said.items() if text),
        *("--epub-cover-image", image),
    )
