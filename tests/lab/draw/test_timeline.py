"""The rows of a timeline."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial.lab.draw.timeline import rows_in_flight
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
