"""The timeline's rows and words."""

from itertools import combinations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.timeline import rows_in_flight, timeline, what_fits
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event


def test_what_is_on_its_way_at_once_is_drawn_in_rows_of_its_own():
    moments = [(0, 4), (1, 2), (3, 9), (4, 5), (9, 10)]  # begin and completion
    events = [
        Event(rank, i, "all_reduce", begin, begin + 0.5, done)
        for rank in (0, 1)
        for i, (begin, done) in enumerate(moments)
    ]
    waiting = Event(0, 9, "all_reduce", begin=1, end=2)  # came back when it was complete
    rows = rows_in_flight([*events, waiting])
    assert [rows[0, i] for i in range(5)] == [rows[1, i] for i in range(5)] == [0, 1, 1, 0, 0]
    assert (0, 9) not in rows


@pytest.mark.parametrize(
    "share, span, message",
    [(0.5, "1 scatter", "4 KiB"), (0.06, "1", ""), (0.02, "1", ""), (0.002, "", "")],
)
def test_a_narrow_bar_shows_a_spans_first_word_and_no_part_of_a_size(share, span, message):
    assert what_fits("1 scatter", share, is_span=True) == span
    assert what_fits("4 KiB", share, is_span=False) == message


def three_deep():
    """A span, and above each other calls that are long and short, named and not."""
    yield Event(0, 0, "span", 0, 100, note="backward")
    yield Event(0, 1, "barrier", 100, 120)
    for i in range(6):
        yield Event(0, 2 + 2 * i, "all_reduce", 15 * i, 15 * i + 1, 15 * i + 12, nbytes=1024)
        yield Event(
            0, 3 + 2 * i, "all_reduce", 15 * i, 15 * i + 1, 15 * i + 40, nbytes=262144
        )


def test_words_on_bars_are_dark_on_a_plate_and_large_enough_for_print(monkeypatch):
    monkeypatch.setattr("mgpu_tutorial.lab.draw.timeline.Plot", lambda figure, text: figure)
    figure = timeline(Report(1, events=list(three_deep())))
    words = figure.axes[0].texts
    assert {w.get_text() for w in words} == {"backward", "barrier", "1 KiB", "256 KiB"}
    assert all(w.get_fontsize() >= 8 and w.get_color() == INK for w in words)
    plates = [w.get_bbox_patch() for w in words if w.get_text() != "backward"]
    assert {plate.get_facecolor()[:3] for plate in plates} == {(1, 1, 1)}
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    boxes = [w.get_window_extent(renderer) for w in words]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
