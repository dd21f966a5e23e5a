"""Each notebook in a real browser: as it is cloned, run, played with, narrow, and dark."""

import os
import re

import nbformat
import pytest
from playwright.sync_api import Error

from conftest import ROOT

CHAPTERS = tuple(os.environ.get("CHAPTERS", "").split()) or ""  # how the names begin
PATHS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
STEMS = [path.stem for path in PATHS if path.name.startswith(CHAPTERS)]
VIEW = "application/vnd.jupyter.widget-view+json"
RUN_SECONDS, MOVE_SECONDS = 240, 20
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", params=STEMS)
def notebook(request, opened):
    """A notebook, opened and not run; the tests below follow each other on the same page."""
    opened.said.clear()
    opened.stem = request.param
    opened.notebook(request.param)
    opened.run("application:toggle-left-area")
    yield opened
    opened.run("kernelmenu:shutdown")


def test_stored_drawings_show_before_anything_is_run(notebook):
    stored = nbformat.read(ROOT / "notebooks" / f"{notebook.stem}.ipynb", 4)
    outputs = [out for cell in stored.cells for out in cell.get("outputs", [])]
    drawn = [out for out in outputs if "image/" in str(out.get("data", {}).keys())]
    assert notebook.page.evaluate("look.trusted()") == 0
    found = notebook.page.evaluate("look.pictures()")
    assert len(found) >= len(drawn)
    assert all(width > 60 and height > 20 and natural for width, height, natural in found)


def test_all_cells_run_without_an_unexpected_error(notebook):
    notebook.page.set_default_timeout(RUN_SECONDS * 1000)
    notebook.run("notebook:run-all-cells")
    notebook.page.wait_for_function("look.finished()")
    notebook.page.set_default_timeout(60_000)
    notebook.page.wait_for_timeout(1000)
    cells = notebook.page.evaluate("look.cells()")
    cells = [c for c in cells if c["type"] == "code" and c["count"]]  # no copies of `edit`
    assert [c["count"] for c in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        errors = [out["evalue"] for out in cell["outputs"] if out["output_type"] == "error"]
        assert bool(errors) == ("raises-exception" in cell["tags"]), (cell["i"], errors)
        streams = [out.get("name") for out in cell["outputs"]]
        assert "stderr" not in streams, cell["outputs"]
    expected = sum(VIEW in out.get("data", {}) for c in cells for out in c["outputs"])
    assert notebook.page.evaluate("look.widgets()") == expected


def take_a_step(control):
    """To the right, or to the left where a slider begins at its end."""
    now, most = (control.get_attribute(f"aria-value{which}") for which in ("now", "max"))
    control.press("ArrowLeft" if float(now) >= float(most) else "ArrowRight")


@pytest.mark.parametrize(
    "selector, move",
    [
        (".widget-toggle-button:has-text('Play')", lambda control: control.click()),
        (".widget-dropdown select", lambda control: control.select_option(index=1)),
        (".widget-slider .noUi-handle", take_a_step),
    ],
)
def test_each_control_changes_the_picture(notebook, selector, move):
    page = notebook.page
    for control in page.locator(f".jp-OutputArea-output {selector}").all():
        area = control.locator("xpath=ancestor::*[contains(@class, 'jp-OutputArea ')][1]")
        control.scroll_into_view_if_needed()
        before = area.evaluate("area => look.shows(area)")
        changed = "([area, before]) => look.shows(area) && look.shows(area) !== before"
        how = {"arg": [area.element_handle(), before], "timeout": MOVE_SECONDS * 1000}
        move(control)
        try:
            page.wait_for_function(changed, **how)
        except Error:  # a link that is no bottleneck: at its slowest it is one
            control.press("Home")
            page.wait_for_function(changed, **how)
        if "Play" in selector:
            control.click()  # it plays on: stop it
        page.wait_for_function("look.idle()")


def test_each_control_has_a_name_and_24_pixels(notebook):
    controls = notebook.page.locator(
        ".jp-OutputArea-output :is(button, select, summary, [role=slider]):visible"
    ).evaluate_all(
        """all => all.map(e => [e.ariaLabel ?? e.labels?.[0]?.innerText ?? e.innerText,
          e.getBoundingClientRect().width, e.getBoundingClientRect().height, e.outerHTML])"""
    )
    for name, width, height, page in controls:
        assert re.search("[a-z]", name) and min(width, height) >= 24, page


@pytest.mark.parametrize("width", [1280, 800, 700])
def test_nothing_is_wider_than_the_page(notebook, width):
    notebook.page.set_viewport_size({"width": width, "height": 900})
    notebook.page.wait_for_timeout(800)
    found = notebook.page.evaluate("look.overflows()")
    assert not found and not notebook.said
