"""A pipeline is drawn as it was: a box for each task, where and when it ran."""

import pytest

from mgpu_tutorial.model_parallel import chart
from mgpu_tutorial.model_parallel.tasks import Task


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
    drawn = [path.get_extents() for group in axes.collections for path in group.get_paths()]
    boxes = sorted((box.x0, box.x1, box.y0) for box in drawn[2:])
    expected = [
        (1000 * at, 1000 * at + 500, r + 0.42 * (s // 2 - 1)) for r, s, _, at in places
    ]
    assert boxes == [pytest.approx(box) for box in sorted(expected)]
