"""The timeline's rows and words, apart from its pixels."""

import pytest

from mgpu_tutorial.lab.draw.timeline import rows_in_flight, what_fits
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
