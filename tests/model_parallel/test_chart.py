"""A pipeline is drawn as it was: a box for each task, where and when it ran."""

import pytest

from mgpu_tutorial.model_parallel import chart
from mgpu_tutorial.model_parallel.tasks import Task


def test_each_task_has_a_box_where_and_when_it_was(monkeypatch):
    """Two rows of two stages; times in milliseconds since the first task began."""
    monkeypatch.setattr(chart, "Plot", lambda figure, text: (figure, text))
    places = (
        (0, 0, "F", 0),
        (0, 2, "F", 1),
        (0, 2, "B", 2),
        (1, 1, "F", 0.5),
        (1, 3, "B", 4.5),
    )
    tasks = [
        Task(row, stage, kind, 7, 2 + begin, 2 + begin + 0.5)
        for row, stage, kind, begin in places
    ]
    figure, text = chart.pipeline_chart(tasks, "title", row_name="device")
    assert text == "title\ndevice 0: F7 F7 B7\ndevice 1: F7 B7"
    axes = figure.axes[0]
    assert axes.get_title(loc="left") == "title: idle 75%"  # 2.5 of 2 rows times 5 seconds
    _, *drawn = [
        path.get_extents() for group in axes.collections for path in group.get_paths()
    ]
    boxes = {(box.x0, box.x1, box.y0) for box in drawn[1:]}
    expected = {
        (1000 * (t.begin - 2), 1000 * (t.end - 2), t.row - 0.42 + 0.42 * (t.stage // 2))
        for t in tasks
    }
    assert sorted(boxes) == [pytest.approx(box) for box in sorted(expected)]
    assert [text.get_text() for text in axes.texts] == ["7"] * 5
