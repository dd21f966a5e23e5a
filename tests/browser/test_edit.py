"""A worker is taken into a cell, changed and launched; its listing leads to its file."""

import pytest

NOTEBOOK = "01_point_to_point"


@pytest.fixture(scope="module")
def notebook(opened):
    """A notebook of which the first code cell is run."""
    opened.notebook(NOTEBOOK)
    opened.page.evaluate("look.panel().content.activeCellIndex = 1")
    opened.run("notebook:run-cell")
    yield opened
    opened.page.evaluate("jupyterapp.serviceManager.sessions.shutdownAll()")


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


def test_a_worker_appears_in_a_cell_is_changed_and_launched(notebook):
    notebook.run("notebook:insert-cell-below")
    assert run_cell(notebook, 2, "edit(messages.blocking)") == []
    source = "look.panel().content.widgets[3].model.sharedModel.source"
    notebook.page.wait_for_function(f"{source}.includes('def blocking')")
    copy = notebook.page.evaluate(source)
    assert run_cell(notebook, 3, copy.replace("value += 1", "value += 41")) == []
    notebook.run("notebook:insert-cell-below")
    [shown] = run_cell(notebook, 4, "launch(blocking, 2)")
    assert shown["data"]["text/plain"].count("after:  41") == 2


def test_a_solution_is_folded_and_gives_nothing_away(notebook):
    folded = notebook.page.locator(".jp-Notebook .jp-Placeholder-contentContainer")
    lines = {line for line in folded.all_inner_texts() if line.strip()}
    assert lines == {"# Solution (click to open)"} and folded.count() == 4


def test_a_listing_leads_to_its_file(notebook):
    notebook.page.locator(".jp-OutputArea-output a", has_text=".py").first.click()
    notebook.page.wait_for_function(
        "jupyterapp.shell.currentWidget.context?.path"
        " === 'mgpu_tutorial/point_to_point/messages.py'"
    )
    assert not notebook.said
