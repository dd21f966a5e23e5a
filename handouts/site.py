"""The whole collection for static hosting: `make site` writes build/site/.

One folder that needs nothing else: web pages at its top, PDFs, slides, the EPUB, and the
notebooks as they are and with open predictions. Where the repository is on GitHub, each page
has links that open its notebook elsewhere.
"""

import shutil
import zipfile
from pathlib import Path

import nbformat

from handouts import student, web
from handouts.build import build
from handouts.doors import doors, repository, with_install
from handouts.notebook import ROOT


def assemble(
    out: Path, names: tuple = (), folder: Path = ROOT / "notebooks", github: str | None = None
) -> list[str]:
    """Make the site anew; returns a line about it."""
    github = repository(folder.parent) if github is None else github
    if out.exists():
        shutil.rmtree(out)
    site = web.Site(pages=".", base="", hosted=True, github=github)
    build(out, names, folder, site)
    shutil.rmtree(out / ".work")
    (out / ".nojekyll").touch()  # GitHub serves the files as they are
    pages = sorted(out.glob("*.html"))
    stems = [page.stem for page in pages if (folder / f"{page.stem}.ipynb").exists()]
    (out / "notebooks").mkdir()
    for stem in stems:
        shutil.copyfile(folder / f"{stem}.ipynb", out / "notebooks" / f"{stem}.ipynb")
    student.write(out / "open", tuple(stems), folder)
    with zipfile.ZipFile(out / "notebooks.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("notebooks", "open"):
            for file in sorted((out / name).glob("*.ipynb")):
                archive.write(file, f"{name}/{file.name}")
    if github:
        (out / "doors").mkdir()
        for stem in stems:
            made = with_install(folder / f"{stem}.ipynb", github)
            nbformat.write(made, out / "doors" / f"{stem}.ipynb")
    size = sum(file.stat().st_size for file in out.rglob("*.*")) / 1e6
    ways = f"opens in {', '.join(doors(github, ''))}" if github else "no origin on GitHub"
    return [f"{len(pages)} pages, {size:.0f} MB, {ways}"]
