"""Listings with links to their files, and copies of workers that can be changed."""

import inspect

import pytest

from mgpu_tutorial import CHAPTERS
from mgpu_tutorial.__main__ import workers_of
from mgpu_tutorial.lab import edit, launch, show_source
from mgpu_tutorial.lab.teach.source import editable

FACTOR = 3


def times(number: int) -> int:
    return FACTOR * number


def scaled(rank, world_size):
    return [times(rank) for _ in range(world_size)]


def names_of(code):
    """The global names and attributes that a function or a class's methods use."""
    inner = [part for part in code.co_consts if inspect.iscode(part)]
    return {*code.co_names}.union(*map(names_of, inner))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_worker_can_be_taken_into_a_cell(chapter):
    for name, worker in workers_of(chapter).items():
        cell = {"__name__": "__main__"}
        exec(compile(editable(worker), "cell", "exec"), cell)
        copy = cell[worker.__name__]
        assert copy is not worker, name
        parameters = [list(inspect.signature(each).parameters) for each in (copy, worker)]
        assert parameters[0] == parameters[1], name
        original = inspect.unwrap(worker)
        used = names_of(original.__code__) & original.__globals__.keys()
        assert used - {"__name__"} <= cell.keys(), name


def test_a_copy_that_was_changed_is_what_is_launched(capsys):
    edit(scaled)
    text = capsys.readouterr().out
    head = "# A copy of scaled: change a line, run this cell, then launch it."
    assert text.startswith(f"{head}\nfrom {__name__} import *\n\n\ndef scaled(")
    cell = {"__name__": "__main__"}
    exec(compile(text.replace("times(rank)", "times(rank) + 10"), "cell", "exec"), cell)
    assert launch(cell["scaled"], 2).results == [[10, 10], [13, 13]]


def test_show_source_follows_the_file(tmp_path, monkeypatch):
    file = tmp_path / "lesson_text.py"
    file.write_text("def worker():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import lesson_text

    file.write_text("# a new first line\n\n\ndef worker():\n    return 'new'\n")
    assert repr(show_source(lesson_text.worker)) == "def worker():\n    return 'new'"
    file.write_text("def other(): ...\n")
    with pytest.raises(ValueError, match="worker is no longer in lesson_text.py"):
        show_source(lesson_text.worker)
