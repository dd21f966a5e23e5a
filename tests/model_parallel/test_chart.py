"""Pipelines are drawn in their order, and no number is wider than its box."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as some
from matplotlib.backends.backend_agg import FigureCanvasAgg

from mgpu_tutorial.model_parallel import chart
from mgpu_tutorial.model_parallel.tasks import Task
from tests.lab.test_colours import contrast

TWO = [
    Task(0, 0, "F", 0, 0, 1),
    Task(1, 1, "F", 0, 1, 2),
    Task(1, 1, "B", 0, 2, 4),
    Task(0, 0, "B", 0, 4, 6),
]


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="no task"):
        chart.pipeline_chart([], "empty")


def test_a_pipeline_chart_says_the_order_and_no_time():
    plot = chart.pipeline_chart(TWO, "two stages")
    assert repr(plot) == "two stages\nrank 0: F0 B0\nrank 1: F0 B0"
    assert plot.png == chart.pipeline_chart(TWO, "two stages").png
    assert "device 0: F0 B0" in repr(chart.pipeline_chart(TWO, "two", row_name="device"))


@pytest.fixture
def figure_of(monkeypatch):
    monkeypatch.setattr(chart, "Plot", lambda figure, text: figure)
    return lambda tasks: chart.pipeline_chart(tasks, "title")


def test_each_task_has_a_box_where_and_when_it_was(figure_of):
    """Two rows of two stages; times in milliseconds since the first task began."""
    tasks = [
        Task(row, stage, kind, 7, 2 + begin, 2 + begin + 0.5)
        for row, stage, kind, begin in (
            *((0, 0, "F", 0), (0, 2, "F", 1), (0, 2, "I", 2), (0, 2, "W", 3)),
            *((1, 1, "F", 0.5), (1, 3, "B", 4.5)),
        )
    ]
    axes = figure_of(tasks).axes[0]
    assert axes.get_title(loc="left") == "title: idle 70%"  # 3 of 2 rows times 5 seconds
    idle, *drawn = [
        path.get_extents() for group in axes.collections for path in group.get_paths()
    ]
    assert (idle.x0, idle.x1) == (0, 5000)
    boxes = {(box.x0, box.x1, box.y0) for box in drawn[1:]}
    expected = {
        (1000 * (t.begin - 2), 1000 * (t.end - 2), t.row - 0.42 + 0.42 * (t.stage // 2))
        for t in tasks
    }
    assert sorted(boxes) == [pytest.approx(box) for box in sorted(expected)]
    assert [text.get_text() for text in axes.texts] == ["7"] * 6
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["rank 0\nstages 0, 2", "rank 1\nstages 1, 3"]


@pytest.mark.parametrize("row", range(8))
def test_a_micro_batch_can_be_read_in_its_box_and_tells_its_kind(row):
    faces = set()
    for kind in chart.LOOKS:
        face, ink, hatch = chart.appearance(Task(row, row, kind, 0, 0.0, 1.0))
        assert contrast(face, ink) >= 4.5
        assert not hatch or contrast("#ffffff", ink) >= 4.5  # its lines are white
        faces.add((face, hatch))
    assert len(faces) == 3  # B and I are never drawn together
    other = chart.appearance(Task(row + 1, row, "F", 0, 0.0, 1.0))
    assert other != chart.appearance(Task(row, row, "F", 0, 0.0, 1.0))


@given(some.integers(0, 99).map(str), some.floats(0, 60), some.floats(6, 20))
def test_a_number_is_no_wider_than_its_box_and_never_too_small_to_read(number, width, wanted):
    size, angle = chart.fitting(number, width, wanted)
    digits = 1 if angle else len(number)
    assert size == 0 or chart.SMALLEST <= size <= wanted
    assert digits * 0.696 * size < max(width, 1)  # of a digit in DejaVu Sans Bold


def test_sixteen_micro_batches_do_not_overlap(figure_of):
    tasks = [
        Task(0, s, k, i, 3 * i + n, 3 * i + n + 1)
        for s in (0, 1)
        for n, k in enumerate("FIW")
        for i in range(16)
    ]
    figure = figure_of(tasks)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    boxes = [text.get_window_extent(renderer) for text in figure.axes[0].texts]
    assert len(boxes) == 96
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
