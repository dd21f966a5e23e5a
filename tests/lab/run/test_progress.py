"""The progress bar shows while the ranks work, and is gone from what is stored."""

import os

import nbformat
import pytest
from nbclient import NotebookClient

from mgpu_tutorial.lab import launch, progress, status
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
    *shown, last = client.seen
    first, *_, latest = [data["text/html"] for data in shown if data]
    assert 'max="40"' in first and "of 40 steps" in latest and first != latest and last == {}
    assert all(f"rank {rank}</b> loss &lt; " in latest for rank in (0, 1))
    outputs = [still(output) for output in notebook.cells[0].outputs]
    assert [out["data"] for out in outputs if out] == [{"text/plain": "[0, 1]"}]


def count(rank, world_size):
    before = len(os.listdir("/proc/self/fd"))
    for _ in progress(range(3)):
        break  # leaves no descriptor
    return sum(progress(range(50))), len(os.listdir("/proc/self/fd")) - before


def test_progress_counts_in_a_rank_and_outside():
    assert launch(count, 2).results == [(1225, 0)] * 2
    assert count(0, 1)[0] == 1225


def test_a_loop_says_before_each_step_how_many_are_done(tmp_path, monkeypatch):
    monkeypatch.setenv("MGPU_RANK_FOLDER", str(tmp_path))
    said = [
        (tmp_path / "progress").read_text().split() for _ in progress(iter("ab"), total=2)
    ]
    said += [(tmp_path / "progress").read_text().split()]
    assert said == [["0", "2"], ["1", "2"], ["2", "2"]]
    status("any character: \ud800")
    assert (tmp_path / "status").read_text(encoding="utf-8") == "any character: \\ud800"
