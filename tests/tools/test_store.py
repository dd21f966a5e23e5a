"""A time is stored from a quiet machine, or stays as it was."""

import nbformat
import pytest

from tools import store

TIMED = {"tags": ["nbval-ignore-output"]}


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A notebook that shows a time and a result, both stored before; and runs of it."""
    code, says = nbformat.v4.new_code_cell, nbformat.v4.new_output
    cells = code("time", metadata=TIMED), code("result")
    for cell in cells:
        cell.outputs = [says("stream", text="before")]
    path = tmp_path / "00_book.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[*cells]), path)
    runs = []

    def execute(path):
        runs.append(nbformat.read(path, as_version=4))
        for cell in runs[-1].cells:
            cell.outputs = [says("stream", text=f"run {len(runs)}")]
        return runs[-1]

    monkeypatch.setattr(store, "execute", execute)
    monkeypatch.setattr(store.one_text, "write", lambda path: None)
    monkeypatch.setattr(store.time, "sleep", lambda seconds: None)
    return path


def shares(monkeypatch, *got):
    """What a process gets of a core, one number per question."""
    rest = iter(got)
    monkeypatch.setattr(store, "share", lambda: next(rest))


def outputs(path):
    return [cell.outputs[0].text for cell in nbformat.read(path, as_version=4).cells]


def test_a_quiet_machine_stores_all(book, monkeypatch):
    shares(monkeypatch, 1.0, 0.99)
    store.store(book)
    assert outputs(book) == ["run 1", "run 1"]


def test_it_waits_for_quiet_and_runs_again_if_the_machine_was_busy_at_the_end(
    book, monkeypatch, capsys
):
    shares(monkeypatch, 0.5, 0.6, 1.0, 0.7, 1.0, 1.0)
    store.store(book)
    assert outputs(book) == ["run 2", "run 2"]
    assert "a process gets 50% of a core" in capsys.readouterr().out


def test_a_machine_that_stays_busy_is_refused(book, monkeypatch):
    monkeypatch.setattr(store, "share", lambda: 0.5)
    monkeypatch.setattr(store, "PATIENCE", 0)
    with pytest.raises(SystemExit, match="Close what runs beside, or keep the times: --busy"):
        store.store(book)
    shares(monkeypatch, *[1.0, 0.5] * 3)
    with pytest.raises(SystemExit, match="busy at its end, three times"):
        store.store(book)
    assert outputs(book) == ["before", "before"]


def test_busy_keeps_the_stored_times(book, monkeypatch):
    shares(monkeypatch)
    store.store(book, busy=True)
    assert outputs(book) == ["before", "run 1"]


def test_a_share_is_measured():
    assert 0 < store.share() < 1.1
