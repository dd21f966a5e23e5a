"""The site is whole: links lead somewhere, doors open, and the search finds no solution."""

import html
import json
import re
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell

from handouts import doors, web
from handouts.notebook import ROOT, Notebook
from handouts.site import assemble
from mgpu_tutorial.lab import Table
from tests.handouts.conftest import printed, shown, tagged, write

GITHUB = "me/course"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Two small chapters and a README."""
    folder = tmp_path_factory.mktemp("collection")
    (folder / "constraints.txt").write_text("torch==2.13.0\ntorchvision==0.28.0\nruff==1\n")
    (folder / "README.md").write_text("# A small one\n\nIts first words.\n\n## More\n\nText.")
    table = Table(["", "n"], [["rank 0", 1]])._repr_html_()
    for name, other in (("00_first", "01_second"), ("01_second", "00_first")):
        text = f"See [it]({other}.ipynb) and [more](../README.md#more): `all_reduce`."
        section = "## 1. A section\n\n$$x = 1$$\n\n**Predict** it."
        cells = [
            new_markdown_cell(f"# {name[3:].title()}\n\nAbout 5 minutes.\n\n{text}"),
            new_markdown_cell(section),
            new_code_cell("1 + 1", outputs=printed("2\n")),
            new_code_cell("table", outputs=shown(text__html=table, text__plain="table")),
            new_markdown_cell("It is two."),
            tagged("answer = ...", "exercise"),
            tagged("# Solution (click)\nunfindable = 7", "solution", printed("told")),
        ]
        write(folder, cells, name)
    assemble(folder / "site", folder=folder / "notebooks", github=GITHUB)
    return folder / "site"


@pytest.mark.slow
def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    pages = {path.name: path.read_text(encoding="utf-8") for path in site.glob("*.html")}
    assert set(pages) == {"00_first.html", "01_second.html", "index.html", "readme.html"}
    for name, page in pages.items():
        for link in map(html.unescape, re.findall(r'href="((?!https?:|data:)[^"]+)"', page)):
            file, _, anchor = link.partition("#")
            assert not file or (site / unquote(file)).is_file(), (name, link)
            there = not anchor or anchor.startswith("cb")
            assert there or f'id="{anchor}"' in pages[file or name], (name, link)
        assert not re.findall(r'src="(?!data:)|url\((?!"data:)|@import', page)
    assert not (site / ".work").exists() and (site / ".nojekyll").exists()


@pytest.mark.slow
def test_the_index_has_search_and_downloads_and_finds_no_solution(site):
    page = (site / "index.html").read_text(encoding="utf-8")
    data = re.search(r'type="application/json">(.*?)</script>', page, re.S)[1]
    title, section = json.loads(data)[:2]
    assert section[:4] == ["00_first", "00 First", "1. A section", "1-a-section"]
    assert "all_reduce" in title[4] and "Its first words." in page
    assert "unfindable" not in data and "unfindable" in (site / "00_first.html").read_text()
    for file in ("student/book.pdf", "instructor/book.pdf", "book.epub", "notebooks.zip"):
        assert f'href="{file}"' in page and (site / file).stat().st_size > 1000
    for folder in ("notebooks", "open", "doors", "slides"):
        assert list((site / folder).glob("00_first.*")), folder


@pytest.mark.slow
def test_answers_and_solutions_are_folded_and_what_is_wide_is_reached_by_a_key(site):
    page = (site / "00_first.html").read_text(encoding="utf-8")
    assert re.search(r'<details class="answer">\s*<summary>.*?</summary>\s*<pre', page)
    assert re.search(r'<details class="solution">\s*<summary>Solution</summary>', page)
    for kind in ("table", "formula"):
        assert re.search(rf'<\w+ class="{kind}"[^>]*tabindex="0"', page)


def test_beside_a_chapter_stand_its_neighbours():
    books = [Notebook(Path(f"0{i}_{name}.ipynb"), []) for i, name in enumerate("abc")]
    beside = [[pair[0] for pair in web.neighbours(books, i)] for i in range(4)]
    assert beside == [["", "01_b"], ["00_a", "02_c"], ["01_b", ""], ["", ""]]


def test_doors_lead_to_the_copies_that_are_published():
    found = doors.doors(GITHUB, "03_collectives")
    copied = "me/course/blob/gh-pages/doors/03_collectives.ipynb"
    assert found["Colab"].endswith(copied) and copied in unquote(found["Kaggle"])
    assert "urlpath=lab/tree/notebooks/03_collectives.ipynb" in found["Binder"]
    assert doors.doors("", "03_collectives") == {}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_copy_installs_first_and_its_links_are_addresses(path):
    made = doors.with_install(path, GITHUB)
    nbformat.validate(made)
    assert "find_spec" in made.cells[1].source and "torch==" in made.cells[1].source
    for cell in made.cells:
        if cell.cell_type == "markdown":
            links = re.findall(r"\]\(([^)\s]+)\)", cell.source)
            assert all(re.match(r"https?:|#|attachment:", link) for link in links), links
