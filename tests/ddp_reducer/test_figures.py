"""What is counted, timed and drawn, and what the exercise takes."""

import re

import pytest

from mgpu_tutorial.ddp_reducer import figures
from mgpu_tutorial.lab.record.report import Report
from tests.test_exercises import try_answers


def test_the_mean_loss_is_that_of_the_ranks():
    assert figures.mean_losses(Report(3, [[1.0, 4.0], [2.0, 8.0], [6.0, 9.0]])) == [3.0, 7.0]


def test_a_bucket_map_has_a_box_for_each_parameter_and_each_bucket():
    nbytes = {"a.weight": 4096, "a.bias": 16, "b": 16}
    rows = {"first": [["a.weight", "a.bias", "b"]], "then": [["b", "a.bias"], ["a.weight"]]}
    drawing = figures.bucket_map(rows, nbytes)
    assert repr(drawing).splitlines() == [
        "first, bucket 0 (4.03 KiB): a.weight, a.bias, b",
        "then, bucket 0 (32 B): b, a.bias",
        "then, bucket 1 (4 KiB): a.weight",
    ]
    boxes = re.findall(r"<rect [^>]*>", drawing.svg())
    assert len(boxes) == 1 + 3 + 6
    assert sum("#5b5b5b" in box for box in boxes) == 2  # the large one, once a row


VIEW = "'gradient_as_bucket_view': True"


@pytest.mark.slow
def test_the_first_exercise_takes_two_options(capsys):
    right = [
        f"options = {{'bucket_cap_mb': 2, {VIEW}}}",
        f"options = dict(**{{{VIEW}}}, bucket_cap_mb=2)",
    ]
    wrong = {
        "options = ...": "nothing is filled in",
        "options = {}": "'buckets': '1.0 + 5.0'",
        "options = {'bucket_cap_mb': 2}": "6324264",
        f"options = {{'bucket_cap_mb': 1, {VIEW}}}": "1.0 + 1.0",
        f"options = {{{VIEW}}}": "1.0 + 5.0",
    }
    try_answers(capsys, "08_ddp_reducer", "options", right, wrong)
