"""A worker is taken into a cell, changed and launched; its listing leads to its file."""

from pathlib import Path

import pytest

LOOK = (Path(__file__).parent / "look.js").read_text(encoding="utf-8")
NOTEBOOK = "01_point_to_point"
CHECKS = """
from mgpu_tutorial.lab import check

check(1.01, 1.0, hint="a hint")
check(1.0, 1.0)
check(None, 1.0)
"""


@pytest.fixture(scope="module")
def notebook(opened):
    """A notebook of which the first code cell is run."""
    opened.open(f"/lab/tree/notebooks/{NOTEBOOK}.ipynb")
    opened.page.evaluate(
        """async () => {
            const panel = jupyterapp.shell.currentWidget;
            await panel.context.ready;
            await panel.sessionContext.ready;
        }"""
    )
    opened.page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    opened.page.evaluate(LOOK)
    opened.page.evaluate("look.panel().content.activeCellIndex = 1")
    opened.run("notebook:run-cell")
    yield opened
    opened.page.evaluate("jupyterapp.serviceManager.sessions.shutdownAll()")


def text_of(notebook, index):
    return notebook.page.evaluate(
        "i => look.panel().content.widgets[i]?.model.sharedModel.source ?? ''", index
    )


def run_cell(notebook, index, text):
    """Write a cell's text and run it; returns its outputs."""
    notebook.page.evaluate(
        """([i, text]) => {
            const cells = look.panel().content;
            cells.activeCellIndex = i;
            cells.activeCell.model.sharedModel.setSource(text);
        }""",
        [index, text],
    )
    notebook.run("notebook:run-cell")
    notebook.page.wait_for_function("look.idle()")
    return notebook.page.evaluate("look.cells()")[index]["outputs"]


def insert_below(notebook, index):
    notebook.page.evaluate("i => { look.panel().content.activeCellIndex = i }", index)
    notebook.run("notebook:insert-cell-below")


def test_a_worker_appears_in_a_cell_is_changed_and_launched(notebook):
    insert_below(notebook, 1)
    edited = "from mgpu_tutorial.lab import edit\n\nedit(p2p.blocking)"
    assert run_cell(notebook, 2, edited) == []
    notebook.page.wait_for_function(
        "look.panel().content.widgets[3].model.sharedModel.source.includes('def blocking')"
    )
    copy = text_of(notebook, 3)
    assert "import torch.distributed as dist" in copy and copy.count("value += 1") == 1
    notebook.picture("edit-1-copy")
    assert run_cell(notebook, 3, copy.replace("value += 1", "value += 41")) == []
    insert_below(notebook, 3)
    [shown] = run_cell(notebook, 4, "launch(blocking, 2)")
    assert shown["data"]["text/plain"].count("after:  41") == 2
    [original] = run_cell(notebook, 4, "launch(p2p.blocking, 2)")
    assert "after:  1" in original["data"]["text/plain"]
    run_cell(notebook, 4, "launch(blocking, 2)")
    notebook.page.locator(".jp-Notebook .jp-CodeCell").nth(2).scroll_into_view_if_needed()
    notebook.picture("edit-2-launched")


@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Light"])
def test_verdicts_can_be_read_in_each_theme(notebook, theme):
    notebook.run("apputils:change-theme", theme=theme)
    notebook.page.wait_for_timeout(1500)
    wrong, right, _ = run_cell(notebook, 4, CHECKS)
    said = "not yet: the answer is 1.01, off by 1 %\nhint: a hint"
    assert wrong["data"]["text/plain"] == said
    assert right["data"]["text/plain"] == "correct"
    plates = notebook.page.locator(".jp-OutputArea-output .verdict span")
    colours = [
        plates.nth(i).evaluate("e => getComputedStyle(e).backgroundColor") for i in range(3)
    ]
    assert len(set(colours)) == 3
    plates.nth(2).scroll_into_view_if_needed()
    notebook.picture(f"edit-3-verdicts-{theme.split()[1]}")
    faint = [words for words, _ in notebook.page.evaluate("look.faint(4.5)")]
    assert not [words for words in faint if not words.startswith("rank ")]  # in its colour


def test_a_solution_is_folded_and_gives_nothing_away(notebook):
    folded = notebook.page.locator(".jp-Notebook .jp-Placeholder-contentContainer")
    lines = {line for line in folded.all_inner_texts() if line.strip()}
    assert lines == {"%%solution (click to open)"} and folded.count() == 4
    folded.first.scroll_into_view_if_needed()
    notebook.picture("edit-6-solution")


def test_a_listing_leads_to_its_file(notebook):
    link = notebook.page.locator(".jp-Notebook .jp-OutputArea-output a", has_text=".py").first
    link.scroll_into_view_if_needed()
    notebook.picture("edit-4-link")
    link.click()
    notebook.page.wait_for_function(
        "jupyterapp.shell.currentWidget.context?.path === 'mgpu_tutorial/point_to_point.py'"
    )
    notebook.picture("edit-5-file")


def test_the_console_has_no_errors(notebook):
    assert not notebook.said
