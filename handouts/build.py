"""Build the handouts from the stored outputs: `make handouts`, or python -m handouts [03 …].

    build/student/NN_stem.pdf      without solutions, with room to write predictions
    build/instructor/NN_stem.pdf   with solutions, timing and teaching notes
    build/*/book.pdf               all of them in one
    build/slides/NN_stem.pdf       16:9; NN_stem_notes.pdf and NN_stem.pdfpc: what is said
    build/book.epub                all of them for an electronic reader, with solutions
    build/html/index.html          one self-contained page a notebook, and where to find all

Two steps, each in as many processes as there are cores: pandoc and filter.lua make Typst
text and web pages, then Typst makes the PDFs. What has not changed is not built again.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path

from tqdm import tqdm

from handouts import convert, epub, web
from handouts.editions import EPUB, INSTRUCTOR, STUDENT, edition, typst_string
from handouts.notebook import ROOT, Notebook, Unprintable, read, read_text
from handouts.slides import slides

EDITIONS = {STUDENT: "Student's edition", INSTRUCTOR: "Instructor's edition"}

RIGHTS = "Text and figures: CC BY 4.0. Code: MIT."


@dataclass
class Target:
    """A file that `make(*arguments, path)` makes from what `key` is a digest of."""

    path: Path
    make: Callable[..., int | None]
    arguments: tuple
    key: str

    @property
    def name(self) -> str:
        """The folder and the name of the file, such as student/book.pdf."""
        return f"{self.path.parent.name}/{self.path.name}"


@dataclass
class Outcome:
    """What a build did: files made, files kept, pages of each PDF, seconds."""

    built: list[Path] = field(default_factory=list)
    kept: list[Path] = field(default_factory=list)
    pages: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def build(
    names: list[str], out: Path, folder: Path = ROOT / "notebooks", quiet: bool = False
) -> Outcome:
    """Build everything for the notebooks of `folder` whose names begin so, or for all.

    Raises Unprintable with a line for each fault, which begins with its place.
    """
    begin = time.perf_counter()
    plan, outcome = Plan(names, folder, out), Outcome()
    stamps = out / ".work" / "stamps.json"
    known = json.loads(stamps.read_text(encoding="utf-8")) if stamps.exists() else {}
    made: list[Target] = []
    try:
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            for step, what in ((plan.texts, "text"), (plan.pdfs, "PDF")):
                targets = list(step())
                made += targets
                _run(pool, targets, known, outcome, None if quiet else what)
        if not names:
            _forget(known, made, out)
    finally:
        stamps.write_text(json.dumps(known, indent=1))
    pdfs = [target.name for target in made if target.path.suffix == ".pdf"]
    outcome.pages = {name: known[name][1] for name in pdfs}
    outcome.seconds = time.perf_counter() - begin
    return outcome


def _run(
    pool, targets: list[Target], known: dict, outcome: Outcome, what: str | None
) -> None:
    """Make the targets that are not there as they should be."""
    stale = [t for t in targets if not t.path.exists() or known.get(t.name, [""])[0] != t.key]
    outcome.kept += [t.path for t in targets if t not in stale]
    waiting = {pool.submit(t.make, *t.arguments, t.path): t for t in stale}
    problems: list[str] = []
    bar = tqdm(total=len(stale), desc=what, unit="file", disable=what is None or not stale)
    for future in as_completed(waiting):
        target = waiting[future]
        try:
            known[target.name] = [target.key, future.result()]
            outcome.built.append(target.path)
        except Unprintable as problem:
            problems += str(problem).split("\n")
        bar.update()
    bar.close()
    if problems:
        raise Unprintable("\n".join(dict.fromkeys(problems)))


def _forget(known: dict, made: list[Target], out: Path) -> None:
    """Remove what an earlier build made of a notebook that is gone or has another name."""
    for name in set(known) - {target.name for target in made}:
        for folder in (out, out / ".work"):
            (folder / name).unlink(missing_ok=True)
            (folder / name).with_suffix(".pdfpc").unlink(missing_ok=True)
        del known[name]


def digest(*parts: object) -> str:
    """One short word for all that a file is made from."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part if isinstance(part, bytes) else repr(part).encode())
    return whole.hexdigest()[:20]


class Plan:
    """What is to be made, from which notebooks, and how they refer to each other."""

    def __init__(self, names: list[str], folder: Path, out: Path) -> None:
        self.out, self.work = out, out / ".work"
        convert.prepare(self.work)
        media = self.work / "media"
        every = [read(path, media) for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))]
        chosen = tuple(names or [""])
        self.notebooks = [n for n in every if n.path.name.startswith(chosen)]
        if not self.notebooks:
            raise Unprintable(
                f"{folder}: no notebook's name begins with {' or '.join(names)}"
            )
        self.root = folder.parent
        self.documents = [
            read_text(path, media, nested=path.parent != self.root)
            for path in _linked(every, self.root)
        ]
        self.links = [
            {
                "file": n.path.relative_to(self.root).as_posix(),
                "id": n.id,
                "anchors": sorted(n.anchors()),
            }
            for n in [*every, *self.documents]
        ]
        self.series = self.documents[0].title if self.documents else "Handouts"
        self.about = _first_words(self.documents[0]) if self.documents else []
        if self.documents:  # the first of them gives the book its title
            head = self.documents[0].pieces[0]
            self.documents[0].pieces[0] = replace(head, text=self.documents[0].path.stem)
        room = sorted([*convert.ROOM.glob("*.*")])
        self.common = digest(
            *(file.read_bytes() for file in room),
            self.links,
            version("typst"),
            version("pypandoc_binary"),
        )
        self.entries = web.entries(self.notebooks, self.root)

    def _meta(self, notebook: Notebook, slides: bool = False) -> dict:
        file = notebook.path.relative_to(self.root)
        return {
            "file": file.as_posix(),
            "folder": file.parent.as_posix(),
            "id": notebook.id,
            "chapter": str(int(notebook.number)) if notebook.number else "",
            "root": str(self.root),
            "slides": slides,
            "links": self.links,
        }

    def texts(self) -> Iterator[Target]:
        """The first step: Typst text of each form of each notebook, and the web pages."""
        for i, n in enumerate([*self.notebooks, *self.documents]):
            key = digest(self.common, n.path.read_bytes())
            meta = self._meta(n)
            for name in EDITIONS:
                yield Target(self._text(name, n), paper_text, (n, name, meta), key)
            chapter = self.work / "epub" / f"{n.id}.json"
            yield Target(chapter, epub_text, (n, meta), key)
            neighbours = web.neighbours(self.notebooks, i)
            arguments = (n, meta, self.series, neighbours, self.work / "media")
            page = self.out / "html" / f"{n.id}.html"
            yield Target(page, web.page, arguments, digest(key, self.series, neighbours))
            if n.number:
                arguments = (n, self._meta(n, slides=True))
                yield Target(self._text("slides", n), slides_text, arguments, key)
        index = self.out / "html" / "index.html"
        arguments = (self.entries, self.series, self.about, self.work / "media")
        key = digest(self.common, self.entries, self.series, self.about)
        yield Target(index, web.index, arguments, key)

    def _text(self, form: str, notebook: Notebook) -> Path:
        return self.work / form / f"{notebook.id}.body.typ"

    def pdfs(self) -> Iterator[Target]:
        """The second step: the books, which take longest, then the PDFs of one notebook."""
        for name in EDITIONS:
            both = [*self.notebooks, *self.documents]
            yield self._pdf(name, both, "book", self._book(name))
        yield self._epub([*self.notebooks, *self.documents])
        for n in self.notebooks:
            for name in EDITIONS:
                yield self._pdf(name, [n], n.id, self._single(name, n))
            main = '#import "/slides.typ": *\n#show: deck\n'
            main += f'#include "/slides/{n.id}.body.typ"\n'
            yield self._pdf("slides", [n], n.id, main, convert.deck)
            yield self._pdf("slides", [n], f"{n.id}_notes", main, notes="yes")

    def _epub(self, parts: list[Notebook]) -> Target:
        chapters = [self.work / "epub" / f"{part.id}.json" for part in parts]
        key = digest(self.common, self.series, *(file.read_bytes() for file in chapters))
        arguments = (chapters, self.series, RIGHTS, self.work)
        return Target(self.out / "book.epub", epub.book, arguments, key)

    def _pdf(
        self,
        form: str,
        parts: list[Notebook],
        name: str,
        main: str,
        make: Callable = convert.pdf,
        **more: str,
    ) -> Target:
        source = self.work / form / f"{name}.typ"
        source.write_text(main, encoding="utf-8")
        title = parts[0].headline if len(parts) == 1 else self.series
        inputs = {"title": title, "here": ",".join(part.id for part in parts), **more}
        bodies = [self._text(form, part).read_bytes() for part in parts]
        key = digest(self.common, main, inputs, *bodies)
        return Target(self.out / form / f"{name}.pdf", make, (source, self.work, inputs), key)

    def _single(self, name: str, n: Notebook) -> str:
        return "\n".join(
            [
                '#import "/paper.typ": *',
                f"#show: paper.with({typst_string(n.headline)}, "
                f"{typst_string(EDITIONS[name])})",
                f"#opening({typst_string(self.series)}, {typst_string(EDITIONS[name])})",
                f'#include "/{name}/{n.id}.body.typ"',
            ]
        )

    def _book(self, name: str) -> str:
        torch = re.search(r"^torch==([\d.]+)", _constraints(self.root), re.M)
        made = f"Every output was made with PyTorch {torch[1]}." if torch else ""
        chapters = [f'#include "/{name}/{n.id}.body.typ"' for n in self.notebooks]
        appendix = [f'#include "/{name}/{n.id}.body.typ"' for n in self.documents]
        appendix[:1] = [f"#appendix()\n{first}" for first in appendix[:1]]
        return "\n#pagebreak(weak: true)\n".join(
            [
                '#import "/paper.typ": *\n'
                f"#show: paper.with({typst_string(self.series)}, "
                f"{typst_string(EDITIONS[name])}, book: true)\n"
                f"#title-page({typst_string(self.series)}, {typst_string(EDITIONS[name])}, "
                f"[{made}])\n#contents()",
                *chapters,
                *appendix,
            ]
        )


def _first_words(document: Notebook) -> list[str]:
    """The text under the title of a page, up to its first heading."""
    prose = list(takewhile(lambda piece: piece.kind != "heading", document.pieces[1:]))
    return [piece.text for piece in prose]


def _constraints(root: Path) -> str:
    file = root / "constraints.txt"
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _linked(notebooks: list[Notebook], root: Path) -> list[Path]:
    """The pages of text that the notebooks speak of: they come along, as appendices."""
    found = {
        (n.path.parent / link).resolve(): None
        for n in notebooks
        for piece in n.pieces
        if piece.kind in ("prose", "navigation")
        for link in re.findall(r"\]\(([^)#]+\.md)", piece.text)
    }
    return sorted(path for path in found if path.is_file() and path.is_relative_to(root))


def paper_text(notebook: Notebook, name: str, meta: dict, path: Path) -> None:
    """The Typst text of an edition of a notebook."""
    body = convert.pandoc(edition(notebook, name), meta, "-t", "typst")
    _write(path, '#import "/paper.typ": *\n' + body)


def epub_text(notebook: Notebook, meta: dict, path: Path) -> None:
    """The blocks of a notebook for an electronic book."""
    epub.blocks(edition(notebook, EPUB), meta, path)


def slides_text(notebook: Notebook, meta: dict, path: Path) -> None:
    """The Typst text of the slides of a notebook."""
    body = convert.pandoc(slides(notebook), meta, "-t", "typst")
    _write(path, '#import "/slides.typ": *\n' + body)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="handouts", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="how the names of notebooks begin (all)")
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="the folder (build)")
    given = parser.parse_args(words)
    try:
        outcome = build(given.names, given.out)
    except Unprintable as problem:
        print(problem, file=sys.stderr)
        return 1
    for name, pages in outcome.pages.items():
        print(f"{name:50} {pages:4} pages")
    print(
        f"{len(outcome.built)} files built, {len(outcome.kept)} kept as they were, "
        f"{outcome.seconds:.1f} s. Begin with {given.out / 'html' / 'index.html'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
