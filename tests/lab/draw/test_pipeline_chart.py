"""Pipelines are drawn in their order; idle time and micro-batches in flight are counted."""

import itertools

import pytest

from mgpu_tutorial.lab import (
    fastest_step,
    idle_share,
    in_flight,
    in_order,
    launch,
    minimum_plot,
    pipeline_chart,
    pipeline_steps,
)
from mgpu_tutorial.lab.draw.minimum_plot import fastest_setting
from mgpu_tutorial.lab.draw.pipeline_chart import SMALLEST, fitting
from mgpu_tutorial.lab.record.pipeline_steps import Task, duration
from tests.lab.draw import ranks


def tasks_of(*rows):
    return [Task(row, row, kind, micro, a, b) for row, kind, micro, a, b in rows]


TWO = tasks_of((0, "F", 0, 0, 1), (1, "F", 0, 1, 2), (1, "B", 0, 2, 4), (0, "B", 0, 4, 6))


def one_after_the_other(order):
    """The tasks of row 0 in this order, a second each."""
    names = [(name[0], int(name[1:])) for name in order.split()]
    return tasks_of(*((0, kind, i, t, t + 1) for t, (kind, i) in enumerate(names)))


def test_the_idle_share_counts_what_is_between_the_boxes():
    assert duration(TWO) == 6 and idle_share(TWO) == pytest.approx(0.5)
    assert in_order(TWO, 1) == ["F0", "B0"]
    assert fastest_step([[*TWO, *tasks_of((0, "W", 0, 6, 7))], TWO]) is TWO


@pytest.mark.parametrize(
    "order, most",
    [
        ("F0 B0 F1 B1", 1),
        ("F0 F1 F2 B0 B1 B2", 3),
        ("F0 F1 B0 F2 B1 B2", 2),
        ("F0 I0 F1 I1 W0 W1", 1),  # I sends the gradient on, and W may come much later
        ("F0 F1 I0 W0 F2 I1 F3 I2 I3 W1 W2 W3", 2),
    ],
)
def test_a_micro_batch_is_in_flight_until_its_gradient_is_sent(order, most):
    assert in_flight(one_after_the_other(order), 0) == most


def test_the_steps_of_a_launch_are_told_apart():
    first, second = pipeline_steps(launch(ranks.two_marked_steps, 2, trace=True))
    for rank in (0, 1):
        assert in_order(first, rank) == ["F0", "I0", "W0"]
        assert in_order(second, rank) == ["F1", "B1"]
    assert {(task.row, task.stage) for task in first + second} == {(0, 0), (1, 1)}


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="no task"):
        pipeline_chart([], "empty")
    with pytest.raises(ValueError, match="launch with trace=True"):
        pipeline_steps(launch(ranks.two_marked_steps, 1))
    with pytest.raises(ValueError, match="at least one measurement"):
        minimum_plot({1: []}, {1: 1.0}, "m", "seconds")


def test_a_pipeline_chart_says_the_order_and_no_time():
    plot = pipeline_chart(TWO, "two stages")
    assert repr(plot) == "two stages\nrank 0: F0 B0\nrank 1: F0 B0"
    assert plot.png.startswith(b"\x89PNG")
    assert plot.png == pipeline_chart(TWO, "two stages").png
    assert "device 0: F0 B0" in repr(pipeline_chart(TWO, "two", row_name="device"))
    split = [t._replace(kind="I") if t.kind == "B" else t for t in TWO]
    assert pipeline_chart(split, "two stages").png != plot.png


@pytest.mark.parametrize(
    "number, width, size, angle",
    [
        ("9", 20, 10, 0),
        ("15", 20, 10, 0),  # two digits of 7 points, side by side
        ("15", 12, 10, 90),  # they would overlap: on its side the number is 7 points wide
        ("15", 6.6, 8, 90),
        ("9", 6.6, 8, 0),
        ("15", 4, 0, 90),  # left out: nobody could read it
    ],
)
def test_a_number_is_no_wider_than_its_box(number, width, size, angle):
    found = fitting(number, width, 10)
    assert found == (pytest.approx(size), angle)


def test_no_two_numbers_of_a_chart_overlap():
    """Sixteen micro-batches in boxes from hardly visible to wide."""
    for width, number in itertools.product((1, 3, 5, 6, 8, 11, 15, 30), ("1", "15")):
        size, angle = fitting(number, width, 10)
        digits = 1 if angle else len(number)
        assert digits * 0.69 * size < width  # a digit of DejaVu Sans Bold is 0.696 em wide
        assert size == 0 or size >= SMALLEST


def test_the_minimum_is_that_of_the_medians():
    measured = {1: [3.0, 3.1, 9.0], 2: [0.1, 4.0, 5.0], 4: [5.0, 5.0, 5.0]}
    assert fastest_setting(measured) == 1
    plot = minimum_plot(measured, dict.fromkeys(measured, 3.0), "m", "seconds")
    assert repr(plot) == "seconds against m: 1, 2, 4" and plot.png.startswith(b"\x89PNG")
