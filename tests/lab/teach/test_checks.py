"""The judge of the exercises: what is right in any dress, what is not, and what it says."""

import math
import re

import numpy as np
import pytest
import torch

from mgpu_tutorial.lab import check, launch
from mgpu_tutorial.lab.teach.checks import verdict

BLANK = "not yet: nothing is filled in"


def said(capsys, *given, **more):
    assert check(*given, **more) is None
    return capsys.readouterr().out.rstrip("\n")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (2 * (5 - 1) / 5 * 1_000_000, 1_600_000),
        (np.float32(0.3), 0.3),
        (np.array([3]), 3),
        (math.inf, math.inf),
        ("abc", "abc"),
        ([(1, [2, "x"]), torch.tensor(2)], [[1, (2, "x")], 2.0]),
        ([0, 3, 6], range(0, 9, 3)),
        (torch.tensor([0.5, 2.0], requires_grad=True), [0.5, 2]),
        (lambda: 3.0, 3),
    ],
)
def test_what_is_right_is_right_in_any_dress(capsys, answer, expected):
    assert said(capsys, answer, expected, "a hint") == "correct"


def test_a_tolerance_of_nothing_asks_for_the_very_number(capsys):
    assert said(capsys, 0.1 + 0.2, 0.3).startswith("correct")
    assert said(capsys, 0.1 + 0.2, 0.3, tolerance=0).startswith("not yet")
    assert said(capsys, 0.3, 0.3, tolerance=0).startswith("correct")


@pytest.mark.parametrize(
    ("answer", "expected", "reason"),
    [
        (1_600_001, 1_600_000, "your answer, 1600001, is off by 6.3e-05%"),
        (4, 3, "your answer, 4, is not right"),
        (2e-5, 0.0, "your answer, 2e-05, is not right: expected 0"),
        (math.nan, 2.0, "your answer, nan, is off by nan%"),
        (True, 1, "your answer, True, is not right: return a number"),
        (1, True, "your answer, 1, is not right: return a bool"),
        ("abd", "abc", "your answer, 'abd', is not right"),
        ([1, 2], [1, 2, 3], "your answer, [1, 2], is not right: 2 values, expected 3"),
        (
            [[0, 1], [0, "x"]],
            [[0, 1], [0, 1]],
            "your answer[1][1], 'x', is not right: return a number",
        ),
        (torch.ones(3, 2).sum(1), [2.0, 4.0, 2.0], "your answer[1], 2.0, is off by 50%"),
    ],
)
def test_what_is_wrong_is_told_with_its_distance(capsys, answer, expected, reason):
    assert said(capsys, answer, expected, hint="think") == f"not yet: {reason}\nhint: think"


@pytest.mark.parametrize(
    "tolerance, expected, allowed",
    [
        (0.05, 100, 5),
        (0.05, -100.0, 5),
        (None, 0.25, 2.5e-6),
        (None, 100, 1e-7),
        pytest.param(None, 5e-6, 5e-11, id="once"),
    ],
)
def test_the_tolerance_holds_on_both_sides(capsys, tolerance, expected, allowed):
    for factor, is_right in ((0.9, True), (-0.9, True), (1.1, False), (-1.1, False)):
        found = said(capsys, expected + factor * allowed, expected, tolerance=tolerance)
        assert (found == "correct") is is_right


def test_a_small_number_is_not_any_small_number():
    for answer in (0.0, 4e-6, -5e-6):
        assert verdict(answer, 5e-6).is_right is False
    assert verdict(0, 1e-9).is_right is False and verdict(5e-6, 5e-6).is_right


@pytest.mark.parametrize("blank", [None, ..., [None, None], [..., [...]], lambda: ...])
def test_what_was_not_begun_gets_no_hint(capsys, blank):
    assert said(capsys, blank, 3, "think") == BLANK
    assert said(capsys, lambda: int(...), 3, "think").startswith("not yet")
    assert said(capsys, lambda: (...).split(), 3, "think") == BLANK


def raises(error):
    raise error


@pytest.mark.parametrize(
    "error, reason",
    [
        (ValueError("first\nsecond"), "ValueError: first"),
        (AssertionError("two is too many"), "two is too many"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_what_the_answer_raises_is_part_of_the_verdict(capsys, error, reason):
    text = said(capsys, lambda: raises(error), 3, "think")
    assert text == f"not yet: {reason}\nhint: think"


def test_ranks_are_named_where_there_are_ranks(capsys, ranks):
    report, wrong = ranks(2, lambda *given: given), [(0, 2), (1, 3)]
    assert said(capsys, report, report.results) == "correct"
    text = said(capsys, report, wrong)
    assert text == "not yet: rank 1 of 2: its answer[1], 2, is not right"
    found = said(capsys, ranks(2, lambda rank, _: print(rank)), [0, 1], "think")
    assert found == "not yet: the ranks print and return nothing\nhint: think"


def test_a_failed_launch_says_where_each_rank_was(capsys):
    text = said(capsys, lambda: launch(lambda rank, _: 1 / (1 - rank), 2), [0, 0], "think")
    assert re.match(r"not yet: rank 1 raised ZeroDi.*, at test_checks\.py:\d+ ", text)
    assert text.endswith("\nhint: think")


def test_what_an_answer_or_a_hint_holds_is_text_and_no_page():
    page = verdict("<b>", 3, "<think>")._repr_html_()
    assert "<think>" not in page and "&lt;think&gt;" in page
    assert "<b>" not in page and "&lt;b&gt;" in page
