"""The web pages in a real browser: nobody is shut out, and no page scrolls sideways.

axe-core, which comes through npm, looks for violations of WCAG 2.1 AA; AXE names another.
"""

import os
from pathlib import Path

import pytest
from conftest import ROOT

from handouts.build import Plan
from handouts.web import Site

AXE = Path(os.environ.get("AXE", ROOT / ".venv" / "axe-core" / "package" / "axe.min.js"))
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
NAMES = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """The folder of all web pages, without the other forms."""
    out = tmp_path_factory.mktemp("pages")
    for make, given, path in Plan(out, (), ROOT / "notebooks", Site()).pages():
        make(*given, path)
    return out / "html"


@pytest.fixture
def page(browser):
    window = browser.new_page()
    window.said = []
    window.on("pageerror", lambda error: window.said.append(str(error)))
    window.on("console", lambda said: said.type == "error" and window.said.append(said.text))
    yield window
    assert not window.said
    window.close()


@pytest.mark.parametrize("name", ["index", "readme", *NAMES])
@pytest.mark.parametrize("width, scheme", [(390, "light"), (1280, "dark")])
def test_a_page_is_for_everybody(page, pages, name, width, scheme):
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.goto((pages / f"{name}.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    if AXE.is_file():  # npm pack axe-core
        page.add_script_tag(path=AXE)
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        found = page.evaluate("rules => axe.run(document, {runOnly: rules})", RULES)
        assert found["violations"] == []


def test_the_search_finds_a_section_and_says_so(page, pages):
    page.goto((pages / "index.html").as_uri())
    page.get_by_label("Search all chapters").fill("(no such [word")
    assert "Nothing was found." in page.locator("#found").inner_text()
    page.get_by_label("Search all chapters").fill("ring all_reduce")
    assert "Collectives" in page.locator("#found").inner_text()
    assert page.locator("#found mark").count() > 0
    page.locator("#found a").first.click()
    assert page.locator("nav.toc").count() == 1
