"""The web pages in a real browser: nobody is shut out, and no page scrolls sideways.

axe-core, which comes through npm, looks for violations of WCAG 2.1 AA; AXE names another copy
of its file. Pictures of every page are in build/screens/site/.
"""

import os
from pathlib import Path

import pytest

from handouts.build import Plan
from handouts.notebook import ROOT
from handouts.web import Site

AXE = Path(os.environ.get("AXE", ROOT / ".venv" / "axe-core" / "package" / "axe.min.js"))
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]
NAMES = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
WIDTHS, SCHEMES = (390, 800, 1280), ("light", "dark")
SCREENS = ROOT / "build" / "screens" / "site"
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """The folder of all web pages, without the other forms."""
    out = tmp_path_factory.mktemp("pages")
    for make, given, path in Plan(out, (), ROOT / "notebooks", Site()).pages():
        make(*given, path)
    SCREENS.mkdir(parents=True, exist_ok=True)
    return out / "html"


@pytest.fixture(params=["index", "readme", *NAMES])
def file(request, pages):
    return pages / f"{request.param}.html"


def violations(page):
    """What axe-core says of the page, a line each."""
    found = page.evaluate("rules => axe.run(document, {runOnly: rules})", RULES)["violations"]
    return [
        f"{each['id']}: {node['html'][:100]}" for each in found for node in each["nodes"][:3]
    ]


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not here: npm pack axe-core")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_page_violates_wcag(browser, file, scheme):
    width = 390 if scheme == "light" else 1280
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    page.goto(file.as_uri())
    page.add_script_tag(path=AXE)
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert violations(page) == []
    page.close()


def test_no_page_scrolls_sideways(browser, file):
    for scheme in SCHEMES:
        page = browser.new_page(color_scheme=scheme, viewport={"width": 390, "height": 900})
        page.goto(file.as_uri())
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            more = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            page.screenshot(path=SCREENS / f"{file.stem}-{width}-{scheme}.png")
            assert more <= 0, (scheme, width)
        page.close()


def test_the_search_finds_a_section_and_says_so(browser, pages):
    page = browser.new_page()
    said = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto((pages / "index.html").as_uri())
    page.get_by_label("Search all chapters").fill("ring all_reduce")
    first = page.locator("#found a").first
    assert "Collectives" in page.locator("#found").inner_text()
    assert page.locator("#found mark").count() > 0
    first.click()
    assert page.url.rpartition("/")[2].partition("#")[0].endswith(".html")
    page.go_back()
    page.get_by_label("Search all chapters").fill("(no such [word")
    assert "Nothing was found." in page.locator("#found").inner_text()
    assert said == []
    page.close()


def test_an_answer_opens_with_a_key(browser, pages):
    page = browser.new_page()
    page.goto((pages / f"{NAMES[1]}.html").as_uri())
    answer = page.locator("details.answer").first
    assert not answer.locator("pre, .rich, p").first.is_visible()
    answer.locator("summary").focus()
    page.keyboard.press("Enter")
    assert answer.locator("pre, .rich, p").first.is_visible()
    page.close()
