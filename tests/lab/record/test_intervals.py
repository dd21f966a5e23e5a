"""What is read from a run: the length of a span, and its shortest step."""

import pytest

from mgpu_tutorial.lab.record.intervals import events_of, milliseconds, shortest_step
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event


def steps_of_two_ranks(*ends):
    """Step i begins at i on both ranks, and ends at `ends[i][rank]`."""
    return [
        Event(rank, i, "span", float(i), end, note=f"step {i}")
        for i, both in enumerate(ends)
        for rank, end in enumerate(both)
    ]


def test_the_shortest_step_is_that_of_the_slower_rank_and_not_of_the_first_two():
    events = steps_of_two_ranks((0.1, 0.1), (1.1, 1.1), (2.9, 2.2), (3.4, 3.6), (4.2, 4.5))
    call = Event(0, 9, "all_reduce", 4.1, 4.2, nbytes=8)
    run = shortest_step(Report(2, events=[*events, call]))
    assert milliseconds(run, "shortest") == pytest.approx(500)
    assert milliseconds(run, "step 3") == pytest.approx(600)  # of the slower rank too
    assert [event.note for event in run.events].count("shortest") == 2


def test_what_begins_at_either_end_of_its_own_ranks_span_is_inside():
    spans = [Event(0, 99, "span", 3, 6, note="a"), Event(1, 99, "span", 5, 8, note="a")]
    calls = [Event(rank, at, "send", at, at + 2) for rank in range(2) for at in range(12)]
    found = events_of(Report(2, events=[*spans, *calls]), "a")
    wanted = [(0, at) for at in range(3, 7)] + [(1, at) for at in range(5, 9)]
    assert [(event.rank, event.begin) for event in found] == wanted
