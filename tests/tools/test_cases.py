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


def wrong(cell, monkeypatch, behaviours, answer):
    """Run the row of one wrong answer to `double`."""
    _, test_wrong = edited(Builder("double", {double: behaviours}), [answer])
    cases = test_wrong.pytestmark[0]
    row = SimpleNamespace(node=SimpleNamespace(nodeid="tests/double/test_builds.py::row"))
    test_wrong(cell, *cases.args[1][0], row, monkeypatch)
    return cases.kwargs["ids"]


@pytest.mark.parametrize(
    "behaviours, seen, says",
    [
        ([], "of 3: 9", r"every behaviour holds for a wrong answer \(of 3: 9\)"),
        ([doubles], "of 4", "seen='of 3: 9, expected 6'"),
    ],
)
def test_a_wrong_answer_that_is_accepted_is_shown(cell, monkeypatch, behaviours, seen, says):
    answer = Wrong("double", replace={"2 *": "3 *"}, says=seen)
    with pytest.raises(AssertionError, match=rf"(?s){says}.*return 3 \* number"):
        wrong(cell, monkeypatch, behaviours, answer)


def test_a_wrong_answer_is_called_by_what_is_seen(cell, monkeypatch):
    answer = Wrong("double", replace={"2 *": "3 *"}, says="of 3: 9")
    assert wrong(cell, monkeypatch, [doubles], answer) == ["0-of-3-9"]


@pytest.mark.parametrize(
    "name, key, says",
    [
        ("double", "two *", r"(?s)no longer fits `double`: 'two \*'.*return 2 \* number"),
        ("twice", "2 *", "`twice` is no build"),
    ],
)
def test_an_edit_that_no_longer_fits_fails_as_a_row_and_says_where(
    cell, monkeypatch, name, key, says
):
    answer = Wrong(name, replace={key: "3 *"}, says="of 3: 9")
    with pytest.raises(pytest.fail.Exception, match=says) as failed:
        wrong(cell, monkeypatch, [doubles], answer)
    assert "in tests/double/test_builds.py" in str(failed.value)


def refuse(rank, world_size, kind):
    raise kind("bucket_cap_mb is -1: give 0 or more")


@pytest.mark.parametrize("asked", [ValueError("bucket_cap_mb", "-1"), "give 0 or more"])
def test_a_refusal_is_asked_for_by_its_kind_and_names(refused, asked):
    refused(2, asked, refuse, ValueError)


@pytest.mark.parametrize("asked", [TypeError("bucket_cap_mb"), ValueError("-1", "weight")])
def test_a_refusal_of_another_kind_or_of_another_thing_is_none(refused, asked):
    with pytest.raises(AssertionError, match="bucket_cap_mb is -1"):
        refused(2, asked, refuse, ValueError)
