"""The page that `make lab` opens, the way from it and back, and presenting from the lab."""

import re

from conftest import ROOT, TOKEN

PATHS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def test_lab_opens_on_the_contents_which_lead_to_a_notebook_and_back(opened):
    opened.open("/")
    page, where = opened.page, "jupyterapp.shell.currentWidget.context.path"
    table = page.locator(".jp-RenderedMarkdown table").first
    table.wait_for()
    assert "minutes" in table.locator("thead").inner_text()
    rows = table.locator("tbody tr", has=page.locator("a")).all_inner_texts()
    for path, text in zip(PATHS, rows, strict=True):
        assert text.startswith(path.stem[:2]) and re.search(r"\t\d+\t", text), text
    table.locator("a").first.click()
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    assert page.evaluate(where) == f"student/{PATHS[0].name}"
    page.locator(".jp-Notebook a", has_text="Contents").first.click()
    page.wait_for_function(f"{where} === 'student/README.md'")
    assert page.locator(".jp-MarkdownViewer:visible table").count()
    assert not opened.said


def test_live_slides_run_ranks(browser, lab):
    """RISE shows the question, and a cell of a slide launches."""
    (name,) = [path.name for path in PATHS if path.stem.endswith("collectives")]
    page = browser.new_page(viewport={"width": 1280, "height": 720})
    page.goto(f"{lab}/rise/build/slides/{name}?token={TOKEN}")
    page.set_default_timeout(60_000)
    shown = page.locator(".reveal .slides section.present:not(.stack)")
    shown.locator("h2", has_text="How do all ranks agree").wait_for()
    texts = page.locator(".reveal .jp-OutputArea-output pre, .reveal .cm-content")
    sizes = texts.evaluate_all("all => all.map(e => getComputedStyle(e).fontSize)")
    assert len(sizes) > 20 and len(set(sizes)) == 1  # an error is as large as its code
    for _ in range(40):
        cell = shown.locator(".jp-CodeCell").first
        waits = "cell => cell.closest('.fragment:not(.visible)')"
        if cell.count() and not cell.evaluate(waits):
            code = cell.locator(".cm-content")
            code.click()  # waits until the slide stands still
            page.keyboard.press("Control+Enter")
            ran = re.compile(r"\[\d+\]")
            cell.locator(".jp-InputPrompt", has_text=ran).first.wait_for(state="attached")
            if "movements(" in code.inner_text():
                break
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("Space")
        page.wait_for_timeout(700)
    shown.locator(".jp-OutputArea-output img").first.wait_for()
    page.close()
