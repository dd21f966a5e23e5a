"""The rows of a timeline."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial.lab.draw import timeline
from mgpu_tutorial.lab.draw.timeline import rows_in_flight
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


@pytest.mark.parametrize("other, shown", [(0.5, 2), (8, 8)])
def test_a_bar_begins_at_0_and_the_axis_has_room_for_the_longer_report(
    monkeypatch, other, shown
):
    monkeypatch.setattr(timeline, "Plot", lambda figure, text: figure)
    one, like = (Report(1, events=[Event(0, 0, "send", 3, 3 + s)]) for s in (2, other))
    (axes,) = timeline.timeline(one, like).axes
    assert axes.get_xlim() == pytest.approx((0, 1020 * shown))  # milliseconds
    (bar,) = axes.collections
    assert bar.get_datalim(axes.transData).intervalx == pytest.approx((0, 2000))
