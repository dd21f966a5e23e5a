"""A timeline draws what it was given."""

import pytest

from mgpu_tutorial.lab.draw import timeline
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event


@pytest.mark.parametrize("other, shown", [(0.5, 3), (8, 8)])
def test_no_bar_covers_another_and_the_axis_has_room_for_the_longer_report(
    monkeypatch, other, shown
):
    """Two calls are on their way at once, and a third begins when the first is done."""
    monkeypatch.setattr(timeline, "Plot", lambda figure, text: figure)
    calls = [
        Event(0, i, "all_reduce", begin, begin + 0.1, done)
        for i, (begin, done) in enumerate([(3, 5), (4, 6), (5, 6)])
    ]
    like = Report(1, events=[Event(0, 0, "send", 3, 3 + other)])
    (axes,) = timeline.timeline(Report(1, events=calls), like).axes
    assert axes.get_xlim() == pytest.approx((0, 1020 * shown))  # milliseconds
    first, second, third = (bar.get_datalim(axes.transData) for bar in axes.collections)
    assert first.intervalx == pytest.approx((0, 2000))
    assert second.intervalx == pytest.approx((1000, 3000))
    assert first.y0 == third.y0 == pytest.approx(second.y0 - first.height)  # its own row
