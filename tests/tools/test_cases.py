"""The tests' own tools: which case `--once` takes, and what a build's test says."""

from types import SimpleNamespace

import pytest

from mgpu_tutorial.lab.teach.build import Builder, expect
from tests.builds import Wrong, edited
from tests.conftest import _chosen


@pytest.mark.parametrize(
    "ids, chosen",
    [
        (["f"], "f"),
        (["f[1]", "f[2]", "f[3]"], "f[2]"),
        (["f[1]", "f[2]", "f[once]"], "f[once]"),
        (["f[a-once]", "f[a-2]", "f[b-once]"], "f[a-once]"),
        (["f_once[1]", "f_once[not once]", "f_once[3]"], "f_once[not once]"),
        (["f_once[1]", "f_once[at_once]", "f_once[3]", "f_once[4]"], "f_once[3]"),
    ],
)
def test_once_takes_the_case_that_is_marked_else_the_middle_one(ids, chosen):
    items = [SimpleNamespace(nodeid=f"tests/test_x.py::{name}") for name in ids]
    assert _chosen(items).nodeid == f"tests/test_x.py::{chosen}"


def double(number):
    return 2 * number


def doubles(function):
    """double a number"""
    expect(function(3), 6, "of 3")


@pytest.mark.parametrize(
    "behaviours, seen, says",
    [
        ([], "of 3: 9", r"every behaviour holds for a wrong answer \(of 3: 9\)"),
        ([doubles], "of 4", "seen='of 3: 9, expected 6'"),
        ([doubles], "of 3: 9", None),
    ],
)
def test_a_wrong_answer_that_is_accepted_is_shown(cell, monkeypatch, behaviours, seen, says):
    build = Builder("double", {double: behaviours})
    _, test_wrong = edited(build, [Wrong("double", replace={"2 *": "3 *"}, says=seen)])
    cases = test_wrong.pytestmark[0]
    assert cases.kwargs["ids"][0].startswith("0-of-")
    if says is None:
        test_wrong(cell, *cases.args[1][0], monkeypatch)
        return
    with pytest.raises(AssertionError, match=rf"(?s){says}.*return 3 \* number"):
        test_wrong(cell, *cases.args[1][0], monkeypatch)
