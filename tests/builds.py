"""The two tests that each chapter asks of its builds."""

import inspect
from collections.abc import Callable, Iterable, Mapping

import pytest

from mgpu_tutorial.lab.teach.build import Builder, launch


def right_and_wrong(build: Builder, right: Iterable[str], wrong: Iterable[tuple[str, str]]):
    """Right answers in other words pass every row; wrong ones fail, and the row says why."""
    right, wrong = list(right), list(wrong)

    @pytest.mark.slow
    @pytest.mark.parametrize("source", right, ids=range(len(right)))
    def test_right(cell, source):
        assert [row for row in build.rows(*cell(source)) if not row.holds] == []

    @pytest.mark.slow
    @pytest.mark.parametrize("source, seen", wrong, ids=range(len(wrong)))
    def test_wrong(cell, source, seen, monkeypatch):
        monkeypatch.setitem(launch.keywords, "timeout", 3)  # of those that hang
        rows = build.rows(*cell(source))  # one for each behaviour in builds.py
        first_that_fails = next(row for row in rows if not row.holds)
        assert seen in first_that_fails.seen, first_that_fails.seen

    return test_right, test_wrong


def changed(ours: Callable, *edits: str) -> str:
    """A cell with our version, edited: old, new, old, new; an old … goes to the end."""
    source = inspect.getsource(ours)
    for old, new in zip(edits[::2], edits[1::2], strict=True):
        old, rest, _ = old.partition("…")
        assert old in source, old
        source = source.partition(old)[0] + new if rest else source.replace(old, new)
    return f"from {ours.__module__} import *\n\n\n{source}\n"


def edited(build: Builder, edits: Mapping[str, Iterable[tuple[str, ...]]]):
    """The same tests of edits of ours, by name; a wrong one ends with what is said of it."""
    every = [(build.ours[name], edit) for name, of_one in edits.items() for edit in of_one]
    right = [changed(ours, *edit) for ours, edit in every if len(edit) % 2 == 0]
    wrong = [(changed(ours, *edit[:-1]), edit[-1]) for ours, edit in every if len(edit) % 2]
    return right_and_wrong(build, right, wrong)
