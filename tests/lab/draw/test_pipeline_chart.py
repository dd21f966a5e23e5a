"""Pipelines are drawn in their order, and no number is wider than its box."""

import itertools

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from mgpu_tutorial.lab import pipeline_chart
from mgpu_tutorial.lab.draw.pipeline_chart import SMALLEST, fitting
from mgpu_tutorial.lab.record.pipeline_steps import Task

TWO = [
    Task(0, 0, "F", 0, 0, 1),
    Task(1, 1, "F", 0, 1, 2),
    Task(1, 1, "B", 0, 2, 4),
    Task(0, 0, "B", 0, 4, 6),
]


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="no task"):
        pipeline_chart([], "empty")


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


def test_sixteen_micro_batches_can_be_told_apart(monkeypatch):
    monkeypatch.setattr(
        "mgpu_tutorial.lab.draw.pipeline_chart.Plot", lambda figure, text: figure
    )
    tasks = [
        Task(0, s, k, i, 3 * i + n, 3 * i + n + 1)
        for s in (0, 1)
        for n, k in enumerate("FIW")
        for i in range(16)
    ]
    figure = pipeline_chart(tasks, "two stages a row")
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    boxes = [text.get_window_extent(renderer) for text in figure.axes[0].texts]
    assert len(boxes) == 96
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
