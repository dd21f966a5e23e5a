"""A pipeline's steps are told apart; idle time and micro-batches in flight are counted."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.model_parallel import tasks as pipeline
from mgpu_tutorial.model_parallel.tasks import Task

LENGTHS = some.lists(some.integers(1, 5), min_size=1, max_size=6)


@given(some.lists(LENGTHS, min_size=1, max_size=4), some.integers(1, 3), some.integers(0, 9))
def test_the_idle_share_counts_what_is_between_the_boxes(rows, stages, start):
    """Each row works without a pause and then waits for the longest; its stages alternate."""
    tasks = []
    for row, lengths in enumerate(rows):
        ends = [start + sum(lengths[: i + 1]) for i in range(len(lengths))]
        tasks += [
            Task(row, row + len(rows) * (i % stages), "F", i, end - length, end)
            for i, (length, end) in enumerate(zip(lengths, ends, strict=True))
        ]
    longest = max(map(sum, rows))
    assert pipeline.duration(tasks) == longest
    idle = sum(longest - sum(lengths) for lengths in rows)
    assert pipeline.idle_share(tasks) == pytest.approx(idle / (len(rows) * longest))
    later = tasks + [tasks[0]._replace(begin=start + longest, end=start + longest + 1)]
    assert pipeline.fastest_step([later, tasks, later]) is tasks


@given(some.permutations([(kind, i) for i in range(3) for kind in "FB"]))
def test_a_micro_batch_is_in_flight_until_its_gradient_is_sent(names):
    tasks = [Task(1, 1, kind, i, 10.0 - t, 10.5 - t) for t, (kind, i) in enumerate(names)]
    others = [task._replace(row=0, kind="F") for task in tasks]
    order = [f"{kind}{i}" for kind, i in reversed(names)]
    assert pipeline.in_order(tasks + others, 1) == order
    held = [0]
    for name in order:
        held.append(held[-1] + (1 if name[0] == "F" else -1))
    assert pipeline.in_flight(tasks + others, 1) == max(held)


def test_the_steps_of_a_launch_are_told_apart():
    notes = ["step", "F 1 0", "B 1 0", "load", "step", "F 1 12", "B 1 12"]
    events = [Event(0, t, "span", t, t + 0.5, note=note) for t, note in enumerate(notes)]
    events.append(Event(0, 8, "span", 8.0, None, note="F 1 13"))  # it never ended
    events.append(Event(0, 9, "note", 9.0, 9.0, note="F 1 14"))
    first, second = pipeline.pipeline_steps(Report(1, events=events))
    assert first == [Task(0, 1, kind, 0, t, t + 0.5) for t, kind in enumerate("FB", 1)]
    assert second == [Task(0, 1, kind, 12, t, t + 0.5) for t, kind in enumerate("FB", 5)]
    with pytest.raises(ValueError, match="launch with trace=True"):
        pipeline.pipeline_steps(Report(1))
