"""The two tests that each chapter asks of its builds."""

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

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


class Right(NamedTuple):
    """A right answer: our function of this name, with these texts replaced one by one.

    A text that ends with … stands for all from there to the end of the function.
    """

    name: str
    replace: Mapping[str, str]


class Wrong(NamedTuple):
    """A wrong answer, made as a right one is, and what the row that fails says of it."""

    name: str
    replace: Mapping[str, str]
    says: str


def edited(build: Builder, answers: Iterable[Right | Wrong]):
    """The same two tests of answers that are made from ours."""
    answers = list(answers)
    right = [_cell(build, answer) for answer in answers if isinstance(answer, Right)]
    wrong = [
        (_cell(build, answer), answer.says) for answer in answers if isinstance(answer, Wrong)
    ]
    return right_and_wrong(build, right, wrong)


def _cell(build: Builder, answer: Right | Wrong) -> str:
    ours = build.ours[answer.name]
    source = inspect.getsource(ours)
    for old, new in answer.replace.items():
        old, rest, _ = old.partition("…")
        assert old in source, old
        source = source.partition(old)[0] + new if rest else source.replace(old, new)
    return f"from {ours.__module__} import *\n\n\n{source}\n"
