"""The page that `make lab` opens, the way from it and back, and presenting from the lab."""

import re
from pathlib import Path

from conftest import SCREENS, TOKEN

ROOT = Path(__file__).parent.parent.parent
PATHS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def test_lab_opens_on_the_contents(opened):
    opened.open("/")
    page = opened.page
    table = page.locator(".jp-RenderedMarkdown table").first
    table.wait_for()
    rows = table.locator("tbody tr")
    assert rows.count() == len(PATHS)
    for i, path in enumerate(PATHS):
        text = rows.nth(i).inner_text()
        assert path.stem[:2] in text and re.search(r"\b\d+ min\b", text), text
    assert rows.first.evaluate("row => row.getBoundingClientRect().bottom") < 900
    opened.picture("lab-1-contents")


def test_a_notebook_opens_from_the_contents_and_leads_back(opened):
    page = opened.page
    page.locator(".jp-RenderedMarkdown table a").first.click()
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    assert opened.page.evaluate("jupyterapp.shell.currentWidget.context.path") == (
        f"notebooks/{PATHS[0].name}"
    )
    page.locator(".jp-Notebook a", has_text="Contents").first.click()
    page.wait_for_function("jupyterapp.shell.currentWidget.context.path === 'README.md'")
    assert page.locator(".jp-MarkdownViewer:visible table").count()
    opened.picture("lab-2-back")


def test_presenting_from_jupyterlab(opened):
    """The steps that the README describes for a lecture."""
    opened.open(f"/lab/tree/notebooks/{PATHS[1].name}")
    page = opened.page
    page.wait_for_selector(".jp-Notebook .jp-CodeCell .cm-content")
    size = "e => parseFloat(getComputedStyle(e).fontSize)"
    code = page.locator(".jp-Notebook .jp-CodeCell .cm-content").first
    before = code.evaluate(size)
    opened.run("application:toggle-mode")
    opened.run("application:toggle-presentation-mode")
    page.wait_for_timeout(1000)
    assert code.evaluate(size) > before
    opened.picture("lab-3-presenting")
    opened.run("application:toggle-presentation-mode")
    opened.run("application:toggle-mode")


def test_live_slides_run_ranks(browser, lab):
    """RISE shows the question, and a cell of a slide launches."""
    (name,) = [path.name for path in PATHS if path.stem.endswith("collectives")]
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.goto(f"{lab}/rise/build/slides/{name}?token={TOKEN}")
    page.set_default_timeout(60_000)
    shown = page.locator(".reveal .slides section.present:not(.stack)")
    shown.locator("h2", has_text="How do all ranks agree").wait_for()
    for _ in range(40):
        code = shown.locator(".jp-CodeCell .cm-content").first
        if code.count() and code.is_visible():
            code.click()
            page.keyboard.press("Control+Enter")
            if "movements(" in code.inner_text():
                break
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("Space")
        page.wait_for_timeout(700)
    page.wait_for_function("!document.body.innerText.includes('[*]')")
    shown.locator(".jp-OutputArea-output img").first.wait_for()
    page.screenshot(path=SCREENS / "lab-4-slides.png")
    page.close()


def test_the_console_has_no_errors(opened):
    assert not opened.said
