"""A pipeline's steps are told apart; idle time and micro-batches in flight are counted."""

import pytest

from mgpu_tutorial.lab import (
    fastest_step,
    idle_share,
    in_flight,
    in_order,
    launch,
    pipeline_steps,
)
from mgpu_tutorial.lab.record.pipeline_steps import Task, duration
from tests.lab import ranks


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


def test_a_launch_without_a_trace_has_no_steps():
    with pytest.raises(ValueError, match="launch with trace=True"):
        pipeline_steps(launch(ranks.two_marked_steps, 1))
