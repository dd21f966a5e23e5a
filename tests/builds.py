"""The two tests that each chapter asks of its builds."""

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pytest

from mgpu_tutorial.lab.teach.build import Builder, launch


def right_and_wrong(build: Builder, right: Iterable, wrong: Iterable[tuple]):
    """Right answers in other words pass every row; wrong ones fail, and the row says why.

    An answer is the source of a cell, or an edit of ours, which is made when its row runs:
    one that no longer fits fails as a row, and the others run.
    """
    right, wrong = list(right), list(wrong)

    @pytest.mark.slow
    @pytest.mark.parametrize("answer", right, ids=_named(map(_function, right)))
    def test_right(cell, answer, request):
        source = _source(build, answer, request.node.nodeid)
        missed = [row for row in build.rows(*cell(source)) if not row.holds]
        assert missed == [], f"a right answer is refused:\n{source}"

    @pytest.mark.slow
    @pytest.mark.parametrize("answer, seen", wrong, ids=_named(seen for _, seen in wrong))
    def test_wrong(cell, answer, seen, request, monkeypatch):
        source = _source(build, answer, request.node.nodeid)
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
    right = [answer for answer in answers if isinstance(answer, Right)]
    wrong = [(answer, answer.says) for answer in answers if isinstance(answer, Wrong)]
    return right_and_wrong(build, right, wrong)


def _function(answer: str | Right) -> str:
    """The name of the function or class that an answer ends with."""
    if isinstance(answer, Right):
        return answer.name
    return re.findall(r"^(?:def|class) (\w+)", answer, re.MULTILINE)[-1]


def _source(build: Builder, answer: str | Right | Wrong, row: str) -> str:
    """The cell of an answer; an edit that no longer fits ours fails its row, and says so."""
    if isinstance(answer, str):
        return answer
    file = row.partition("::")[0]
    if answer.name not in build.ours:
        pytest.fail(f"`{answer.name}` is no build: change the name in {file}", pytrace=False)
    ours = build.ours[answer.name]
    source = inspect.getsource(ours)
    for old, new in answer.replace.items():
        old, rest, _ = old.partition("…")
        if old not in source:
            why = f"this edit no longer fits `{answer.name}`: {old!r} is not in its text, or"
            why += f" an edit before has taken it. Change the key in {file}; the text is now:"
            pytest.fail(f"{why}\n{source}", pytrace=False)
        source = source.partition(old)[0] + new if rest else source.replace(old, new)
    return f"from {ours.__module__} import *\n\n\n{source}\n"
