"""The two tests that each chapter asks of its builds."""

from collections.abc import Iterable

import pytest

from mgpu_tutorial.lab.teach.build import Builder


def right_and_wrong(build: Builder, right: Iterable[str], wrong: Iterable[tuple[str, str]]):
    """Right answers in other words pass every row; wrong ones fail, and the row says why."""
    right, wrong = list(right), list(wrong)

    @pytest.mark.slow
    @pytest.mark.parametrize("source", right, ids=range(len(right)))
    def test_right(cell, source):
        assert [row for row in build.rows(*cell(source)) if not row.holds] == []

    @pytest.mark.slow
    @pytest.mark.parametrize("source, seen", wrong, ids=range(len(wrong)))
    def test_wrong(cell, source, seen):
        rows = build.rows(*cell(source))
        assert seen in next(row for row in rows if not row.holds).seen

    return test_right, test_wrong
