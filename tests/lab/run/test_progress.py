"""The progress bar shows while the ranks work, and is gone from what is stored."""

import nbformat
import pytest
from nbclient import NotebookClient

from mgpu_tutorial.lab.run.progress import progress, status
from tools.store import still

CELL = """
import time
from mgpu_tutorial.lab import launch, progress, status

def slow(rank, world_size):
    for step in progress(range(20)):
        status(f"loss < {step}")
        time.sleep(0.1)
    return rank

launch(slow, 2).results
"""


class Watching(NotebookClient):
    """A client that keeps every text of the bar that went by."""

    def process_message(self, message, cell, cell_index):
        if message["msg_type"] == "update_display_data":
            self.seen.append(message["content"]["data"])
        return super().process_message(message, cell, cell_index)


@pytest.mark.slow
def test_in_a_notebook_the_bar_moves_and_then_leaves_nothing(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    client = Watching(notebook, resources={"metadata": {"path": str(tmp_path)}})
    client.seen = []
    client.execute()
    shown = [data["text/html"] for data in client.seen if data]
    assert len(shown) >= 2 and "of 40 steps" in shown[-1]
    assert 'max="40"' in shown[0] and shown[0] != shown[-1]
    assert "rank 0</b> loss &lt; " in shown[-1] and "rank 1</b> loss &lt; " in shown[-1]
    assert client.seen[-1] == {}
    outputs = [still(output) for output in notebook.cells[0].outputs]
    assert [out["data"] for out in outputs if out] == [{"text/plain": "[0, 1]"}]


def test_a_loop_says_before_each_step_how_many_are_done(tmp_path, monkeypatch):
    monkeypatch.setenv("MGPU_RANK_FOLDER", str(tmp_path))
    said = [
        (item, (tmp_path / "progress").read_text().split())
        for item in progress((letter for letter in "ab"), total=2)
    ]
    assert said == [("a", ["0", "2"]), ("b", ["1", "2"])]
    assert (tmp_path / "progress").read_text().split() == ["2", "2"]


def test_a_status_may_hold_any_character(tmp_path, monkeypatch):
    monkeypatch.setenv("MGPU_RANK_FOLDER", str(tmp_path))
    status("loss 0.5 \ud800")
    assert (tmp_path / "status").read_text(encoding="utf-8") == "loss 0.5 \\ud800"
