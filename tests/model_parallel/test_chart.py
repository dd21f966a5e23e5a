"""A pipeline's steps are told apart, idle time is counted, and each task is drawn."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.model_parallel import chart
from mgpu_tutorial.model_parallel.chart import Task

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
    assert chart.duration(tasks) == longest
    idle = sum(longest - sum(lengths) for lengths in rows)
    assert chart.idle_share(tasks) == pytest.approx(idle / (len(rows) * longest))


def test_the_steps_of_a_launch_are_told_apart():
    notes = ["step", "F 1 0", "B 1 0", "load", "step", "F 1 12", "B 1 12"]
    events = [Event(0, t, "span", t, t + 0.5, note=note) for t, note in enumerate(notes)]
    events.append(Event(0, 8, "span", 8.0, None, note="F 1 13"))  # it never ended
    events.append(Event(0, 9, "note", 9.0, 9.0, note="F 1 14"))
    first, second = chart.pipeline_steps(Report(1, events=events))
    assert first == [Task(0, 1, kind, 0, t, t + 0.5) for t, kind in enumerate("FB", 1)]
    assert second == [Task(0, 1, kind, 12, t, t + 0.5) for t, kind in enumerate("FB", 5)]


def test_each_task_has_a_box_where_and_when_it_was(monkeypatch):
    """Two rows of two stages; times in milliseconds since the first task began."""
    monkeypatch.setattr(chart, "Plot", lambda figure, text: (figure, text))
    places = [
        (0, 0, "F", 0),
        (0, 2, "F", 1),
        (0, 2, "B", 2),
        (1, 1, "F", 0.5),
        (1, 3, "B", 4.5),
    ]
    tasks = [Task(row, s, kind, 7, 2 + at, 2.5 + at) for row, s, kind, at in places]
    figure, text = chart.pipeline_chart(tasks, "title", row_name="device")
    assert text == "title\ndevice 0: F7 F7 B7\ndevice 1: F7 B7"
    axes = figure.axes[0]
    assert axes.get_title(loc="left") == "title: idle 75%"  # 2.5 of 2 rows times 5 seconds
    bars = axes.patches[2:]  # after the grey of the two rows
    boxes = sorted((b.get_x(), b.get_x() + b.get_width(), b.get_y()) for b in bars)
    expected = [
        (1000 * at, 1000 * at + 500, r + 0.42 * (s // 2 - 1)) for r, s, _, at in places
    ]
    assert boxes == [pytest.approx(box) for box in sorted(expected)]
