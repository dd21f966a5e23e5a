"""The two tests that each chapter asks of its builds."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping

import pytest

from mgpu_tutorial.lab.teach.build import Builder, launch


def right_and_wrong(build: Builder, right: Iterable[str], wrong: Iterable[tuple[str, str]]):
    """Right answers in other words pass every row; wrong ones fail, and the row says why."""
    right, wrong = list(right), list(wrong)

    @pytest.mark.slow
    @pytest.mark.parametrize("source", right, ids=_named(map(_function, right)))
    def test_right(cell, source):
        missed = [row for row in build.rows(*cell(source)) if not row.holds]
        assert missed == [], f"a right answer is refused:\n{source}"

    @pytest.mark.slow
    @pytest.mark.parametrize("source, seen", wrong, ids=_named(seen for _, seen in wrong))
    def test_wrong(cell, source, seen, monkeypatch):
        monkeypatch.setitem(launch.keywords, "timeout", 3)  # of those that hang
        rows = build.rows(*cell(source))  # one for each behaviour in builds.py
        first = next((row for row in rows if not row.holds), None)
        assert first, f"every behaviour holds for a wrong answer ({seen}):\n{source}"
        assert seen in first.seen, f"{first}, of this wrong answer:\n{source}"

    return test_right, test_wrong


def _named(texts: Iterable[str]) -> list[str]:
    """Ids that a person can read, in letters that a shell leaves alone."""
    words = (re.sub(r"\W+", "-", text).strip("-")[:40] for text in texts)
    return [f"{i}-{text}" for i, text in enumerate(words)]


def _function(source: str) -> str:
    """The name of the function or class that a cell ends with."""
    return re.findall(r"^(?:def|class) (\w+)", source, re.MULTILINE)[-1]


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
