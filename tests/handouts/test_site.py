"""The site is whole: links lead somewhere, doors open, and the search finds no solution."""

import base64
import html
import json
import re
import subprocess
from urllib.parse import unquote

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell

from handouts.build import Plan
from handouts.notebook import ROOT, elements, stringify
from handouts.site import assemble, repository, with_install
from tests.handouts.conftest import PICTURE, small_chapter, write

GITHUB = "me/course"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Two small chapters and a README."""
    folder = tmp_path_factory.mktemp("collection")
    write(folder, small_chapter())
    head = "# Another\n\nAbout 5 minutes.\n\nSee [it](00_small.ipynb#1.-One)."
    ends = new_code_cell('print("</script>")')  # which a search must not do
    write(folder, [new_markdown_cell(head), ends], "01_second")
    assemble(folder / "site", folder=folder / "notebooks", github=GITHUB)
    return folder / "site"


@pytest.mark.slow
def test_the_contents_show_the_readmes_first_picture_from_under_a_heading_too(tmp_path):
    path = write(tmp_path, small_chapter())
    (tmp_path / "cell.svg").write_bytes(base64.b64decode(PICTURE))
    below = "## Two commands\n\nRun.\n\n![A cell](cell.svg)\n\n*It ran.*\n\nMore."
    for head in ("Why.\n\n", "Why.\n\n![A cell](cell.svg)\n\n*It ran.*\n\n"):
        (tmp_path / "README.md").write_text(f"# A title\n\n{head}{below}", encoding="utf-8")
        about = Plan(tmp_path / "out", (), path.parent).about
        assert [e["t"] for e in elements(about)].count("Image") == 1
        assert stringify(about).replace(" ", "").endswith("Itran.")


@pytest.mark.slow
def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    pages = {path.name: path.read_text(encoding="utf-8") for path in site.glob("*.html")}
    assert set(pages) == {"00_small.html", "01_second.html", "index.html", "readme.html"}
    for name, page in pages.items():
        for link in map(html.unescape, re.findall(r'href="((?!https?:|data:)[^"]+)"', page)):
            file, _, anchor = link.partition("#")
            assert not file or (site / unquote(file)).is_file(), (name, link)
            there = not anchor or anchor.startswith("cb")
            assert there or f'id="{anchor}"' in pages[file or name], (name, link)
        assert not re.findall(r'src="(?!data:)|url\((?!"data:)|@import', page)
    assert 'class="after" href="01_second.html"' in pages["00_small.html"]
    assert 'class="before" href="00_small.html"' in pages["01_second.html"]
    assert not (site / ".work").exists() and (site / ".nojekyll").exists()


@pytest.mark.slow
def test_the_search_finds_no_solution_and_a_page_folds_it(site):
    page = (site / "index.html").read_text(encoding="utf-8")
    data = re.search(r'type="application/json">(.*?)</script>', page, re.S)[1]
    title, section = json.loads(data)[:2]
    assert section[:4] == ["00_small", "00 Title", "1. One", "1-one"]
    assert "A reason." in title[4] and "Its first words." in page
    words = {name: text for name, _, _, _, text in json.loads(data)}
    assert "3 + 4" not in data and words["01_second"].endswith('print("</script>")')
    assert "Its first words." in data and words["readme"] == "Text."  # not chapters alone
    for file in ("student/book.pdf", "instructor/book.pdf", "book.epub", "notebooks.zip"):
        assert f'href="{file}"' in page and (site / file).stat().st_size > 1000
    assert '2 chapters, 10 minutes · start with <a href="00_small.html">00</a>' in page
    for folder in ("notebooks", "open", "doors", "slides"):
        assert list((site / folder).glob("00_small.*")), folder
    page = (site / "00_small.html").read_text(encoding="utf-8")
    assert re.search(r'<details class="answer">\s*<summary>.*?</summary>\s*<pre', page)
    assert re.search(r'<details class="solution">\s*<summary>Solution</summary>', page)
    for kind in ("_open", ""):  # each form is saved under a name of its own
        assert f'download="00_small{kind}.ipynb"' in page
    for kind in ("table", "formula"):  # what is wide is reached by a key
        assert re.search(rf'<\w+ class="{kind}"[^>]*tabindex="0"', page)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_copy_installs_first_and_its_links_are_addresses(path):
    made = with_install(path, GITHUB)
    nbformat.validate(made)
    assert "find_spec" in made.cells[1].source and "torch==" in made.cells[1].source
    for cell in made.cells:
        if cell.cell_type == "markdown":
            links = re.findall(r"\]\(([^)\s]+)\)", cell.source)
            assert all(re.match(r"https?:|#|attachment:", link) for link in links), links


def test_the_repository_is_the_workflows_and_else_that_of_origin(tmp_path, monkeypatch):
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert repository(tmp_path) == ""
    for words in ("init -q", "remote add origin git@github.com:me/course.git"):
        subprocess.run(["git", "-C", tmp_path, *words.split()], check=True)
    assert repository(tmp_path) == "me/course"
    monkeypatch.setenv("GITHUB_REPOSITORY", "fork/course")
    assert repository(tmp_path) == "fork/course"
