"""The timeline's rows and words."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg

from mgpu_tutorial.lab.draw.timeline import rows_in_flight, timeline
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event

MOMENTS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=12)


@given(MOMENTS)
def test_no_two_calls_on_their_way_share_a_row(moments):
    """And there are no more rows than calls on their way at one moment."""
    events = [
        Event(0, i, "all_reduce", begin, begin + 0.5, begin + seconds)
        for i, (begin, seconds) in enumerate(sorted(moments))
    ]
    rows = rows_in_flight([*events, Event(0, 99, "all_reduce", 1, 2)])
    assert rows.keys() == {(0, event.index) for event in events}
    for one, other in combinations(events, 2):
        if one.done > other.begin:
            assert rows[0, one.index] != rows[0, other.index]
    most = [sum(e.begin <= moment < e.done for e in events) for moment in range(30)]
    assert len(set(rows.values())) == max(most)


def three_deep():
    """A span, and above each other calls that are long and short."""
    yield Event(0, 0, "span", 0, 100, note="backward")
    yield Event(0, 1, "barrier", 100, 120)
    for i in range(12):
        begin, seconds, nbytes = 15 * (i // 2), 12 + 28 * (i % 2), 1024 << 8 * (i % 2)
        yield Event(0, 2 + i, "all_reduce", begin, begin + 1, begin + seconds, nbytes=nbytes)


def test_words_on_bars_do_not_overlap(monkeypatch):
    monkeypatch.setattr("mgpu_tutorial.lab.draw.timeline.Plot", lambda figure, text: figure)
    figure = timeline(Report(1, events=list(three_deep())))
    words = figure.axes[0].texts
    assert {w.get_text() for w in words} == {"backward", "barrier", "1 KiB", "256 KiB"}
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    boxes = [w.get_window_extent(renderer) for w in words]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
