"""The whole collection for static hosting: `make site` writes build/site/.

The handouts are built, and then laid out as one folder that needs nothing else: web pages at
its top, PDFs, slides, the EPUB, and the notebooks as they are and with open predictions.
Where the repository is on GitHub, each page has links that open its notebook elsewhere.
"""

import argparse
import html
import shutil
import sys
import time
import zipfile
from pathlib import Path

import nbformat

from handouts import student, web
from handouts.build import build
from handouts.doors import doors, packages, repository, with_install
from handouts.notebook import ROOT, Unprintable

FOLDERS = ("student", "instructor", "slides")


def assemble(built: Path, out: Path, folder: Path, github: str = "") -> list[Path]:
    """Lay out what was built as a site; returns its web pages."""
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / ".nojekyll").touch()  # GitHub serves the files as they are
    stems = sorted(path.stem for path in (built / "html").glob("[0-9][0-9]_*.html"))
    for name in FOLDERS:
        (out / name).mkdir()
        for file in [*(built / name).glob("*.pdf"), *(built / name).glob("*.pdfpc")]:
            shutil.copyfile(file, out / name / file.name)
    shutil.copyfile(built / "book.epub", out / "book.epub")
    _notebooks(out, folder, stems, github)
    pages = [
        _page(file, out, stems, github) for file in sorted((built / "html").glob("*.html"))
    ]
    return pages


def _notebooks(out: Path, folder: Path, stems: list[str], github: str) -> None:
    """The notebooks, each with outputs, with open predictions, and with an installation."""
    (out / "notebooks").mkdir()
    for stem in stems:
        shutil.copyfile(folder / f"{stem}.ipynb", out / "notebooks" / f"{stem}.ipynb")
    student.write(out / "open", folder, tuple(stems))
    with zipfile.ZipFile(out / "notebooks.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("notebooks", "open"):
            for file in sorted((out / name).glob("*.ipynb")):
                archive.write(file, f"{name}/{file.name}")
    if github:
        (out / "doors").mkdir()
        wanted = packages(folder.parent, github)
        for stem in stems:
            made = with_install(folder / f"{stem}.ipynb", github, wanted)
            nbformat.write(made, out / "doors" / f"{stem}.ipynb")


def _page(file: Path, out: Path, stems: list[str], github: str) -> Path:
    """A web page at its place in the site, with the ways to open its notebook."""
    text = file.read_text(encoding="utf-8").replace('href="../', 'href="')
    for stem in stems:
        ways = _ways(stem, github)
        text = text.replace(web.doors_of(stem), ways)
        if file.stem == stem:
            text = text.replace(web.DOORS, ways)
    archive = '<a href="notebooks.zip">all notebooks</a>'
    text = text.replace("<!-- downloads -->", f" {archive}")
    (out / file.name).write_text(text, encoding="utf-8")
    return out / file.name


def _ways(stem: str, github: str) -> str:
    ways = {
        "notebook": f"notebooks/{stem}.ipynb",
        "with open predictions": f"open/{stem}.ipynb",
        **{f"open in {name}": address for name, address in doors(github, stem).items()},
    }
    return " " + " ".join(
        f'<a href="{html.escape(to)}">{label}</a>' for label, to in ways.items()
    )


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="site", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="how the names of notebooks begin (all)")
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="the folder (build)")
    given = parser.parse_args(words)
    begin, github = time.perf_counter(), repository(ROOT)
    try:
        build(given.names, given.out)
        pages = assemble(given.out, given.out / "site", ROOT / "notebooks", github)
    except Unprintable as problem:
        print(problem, file=sys.stderr)
        return 1
    size = sum(file.stat().st_size for file in (given.out / "site").rglob("*.*"))
    print(
        f"{len(pages)} pages, {size / 1e6:.0f} MB, {time.perf_counter() - begin:.0f} s. "
        f"Begin with {given.out / 'site' / 'index.html'}"
    )
    if not github:
        print("No remote origin on GitHub: no links to Binder, Colab, Kaggle and Codespaces.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
