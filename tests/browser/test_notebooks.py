"""Each notebook in a real browser: as it is cloned, run, played with, narrow, and dark."""

import json
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LOOK = (Path(__file__).parent / "look.js").read_text(encoding="utf-8")
CHAPTERS = tuple(os.environ.get("CHAPTERS", "").split()) or ""  # how the names begin
PATHS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
STEMS = [path.stem for path in PATHS if path.name.startswith(CHAPTERS)]
VIEW = "application/vnd.jupyter.widget-view+json"
RUN_SECONDS, MOVE_SECONDS = 240, 40
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", params=STEMS)
def notebook(request, opened):
    """A notebook, opened and not run; the tests below follow each other on the same page."""
    opened.said.clear()
    opened.stem = request.param
    opened.page.set_viewport_size({"width": 1280, "height": 900})
    opened.open(f"/lab/tree/notebooks/{request.param}.ipynb")
    opened.page.evaluate(
        """async () => {
            const panel = jupyterapp.shell.currentWidget;
            await panel.context.ready;
            await panel.sessionContext.ready;
            await jupyterapp.commands.execute('application:toggle-left-area');
        }"""
    )
    opened.page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    opened.page.evaluate(LOOK)
    return opened


def stored(stem):
    return json.loads((ROOT / "notebooks" / f"{stem}.ipynb").read_text(encoding="utf-8"))[
        "cells"
    ]


def stored_pictures(stem):
    """How many pictures the stored outputs of a notebook hold."""
    count = 0
    for cell in stored(stem):
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            page = "".join(data.get("text/html", ""))
            count += page.count("<img") or bool({"image/png", "image/svg+xml"} & set(data))
    return count


def test_stored_drawings_show_before_anything_is_run(notebook):
    assert notebook.page.evaluate("look.trusted()") == 0
    found = notebook.page.evaluate("look.pictures()")
    assert len(found) == stored_pictures(notebook.stem)
    assert all(width > 60 and height > 20 and natural for width, height, natural in found)
    notebook.whole_notebook(f"{notebook.stem}-1-stored")


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
    notebook.page.evaluate("document.activeElement.blur()")
    notebook.whole_notebook(f"{notebook.stem}-2-run")


def test_every_widget_is_present(notebook):
    outputs = [out for c in notebook.page.evaluate("look.cells()") for out in c["outputs"]]
    expected = sum(VIEW in out.get("data", {}) for out in outputs)
    assert notebook.page.evaluate("look.widgets()") == expected
    text = notebook.page.locator(".jp-Notebook").inner_text()
    assert not re.search(r"Error displaying widget|Loading widget|model not found", text)


def test_each_control_changes_the_picture(notebook):
    page = notebook.page
    kinds = {
        "play": ".widget-play button:first-child",
        "slider": ".widget-slider .noUi-handle",
        "menu": ".widget-dropdown select",
    }
    for kind, selector in kinds.items():
        controls = page.locator(f".jp-OutputArea-output {selector}")
        for i in range(controls.count()):
            control = controls.nth(i)
            area = control.locator("xpath=ancestor::*[contains(@class, 'jp-OutputArea ')][1]")
            control.scroll_into_view_if_needed()
            before = area.evaluate("area => look.shows(area)")
            assert before
            if kind == "play":
                control.click()
            elif kind == "menu":
                options = control.locator("option").count()
                control.select_option(index=options - 1)
            else:
                control.focus()
                at_end = control.evaluate(
                    "e => e.getAttribute('aria-valuenow') === e.getAttribute('aria-valuemax')"
                )
                page.keyboard.press("ArrowLeft" if at_end else "ArrowRight")
            changed(page, area.element_handle(), before, f"{kind} {i + 1}")
            if kind == "play":
                control.click()  # it plays on: stop it
            page.wait_for_function("look.idle()")
            notebook.picture(f"{notebook.stem}-3-{kind}{i + 1}")


def changed(page, area, before, name):
    """Wait until what the output shows is another picture than before."""
    try:
        page.wait_for_function(
            "([area, before]) => look.shows(area) && look.shows(area) !== before",
            arg=[area, before],
            timeout=MOVE_SECONDS * 1000,
        )
    except Exception:
        pytest.fail(f"{name} was moved and the picture is the same")


@pytest.mark.parametrize("width", [1280, 800])
def test_nothing_is_wider_than_the_page(notebook, width):
    notebook.page.set_viewport_size({"width": width, "height": 900})
    notebook.page.wait_for_timeout(800)
    found = notebook.page.evaluate("look.overflows()")
    notebook.whole_notebook(f"{notebook.stem}-4-wide{width}", width)
    assert not found


@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Light"])
def test_every_word_stands_out(notebook, theme):
    notebook.page.set_viewport_size({"width": 1280, "height": 900})
    notebook.run("apputils:change-theme", theme=theme)
    notebook.page.wait_for_timeout(1500)
    found = notebook.page.evaluate("look.faint(3)")
    if "Dark" in theme:
        notebook.whole_notebook(f"{notebook.stem}-5-dark")
    assert not found


def test_the_console_has_no_errors(notebook):
    assert not notebook.said
    notebook.run("kernelmenu:shutdown")
