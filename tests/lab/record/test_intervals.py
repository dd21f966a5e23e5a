"""What is read from a run: the length of a span, its shortest step, the bytes inside."""

import pytest

from mgpu_tutorial.lab.record.intervals import milliseconds, payload, shortest_step
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


def test_the_payload_is_that_of_the_collectives_of_one_rank_inside_the_span():
    calls = [
        Event(0, 5, "all_reduce", 0.9, 1.1, nbytes=1),  # before
        Event(0, 6, "all_reduce", 1.0, 1.1, nbytes=10),
        Event(0, 7, "broadcast", 1.5, 1.6, nbytes=100),
        Event(0, 8, "isend", 1.5, 1.6, nbytes=1000),  # no collective
        Event(1, 9, "all_reduce", 1.5, 1.6, nbytes=10_000),
        Event(0, 10, "all_reduce", 2.0, 2.5, nbytes=100_000),  # after
    ]
    report = Report(2, events=[*steps_of_two_ranks((0.5, 0.5), (1.9, 1.9)), *calls])
    assert payload(report, "step 1") == 110
    assert payload(report, "step 1", rank=1) == 10_000
    assert payload(report, "step 0") == 0
