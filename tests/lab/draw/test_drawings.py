"""What was sent late arrives late, and what was not recorded is not drawn."""

import re

import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial.lab import (
    film,
    frame,
    launch,
    note,
    sequence_chart,
    span,
    timeline,
    traffic,
)
from mgpu_tutorial.lab.draw.sequence_chart import MessageLog
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event


def test_what_was_sent_late_arrives_late():
    events = [Event(0, i, "note", i, i, note="busy") for i in range(3)]
    events += [Event(0, 3, "isend", 3, 4, peer=1), Event(1, 0, "recv", 0, 5, peer=0)]
    log = MessageLog(Report(2, events=events))
    assert log.messages == [((0, 3), (1, 0))] and log.rows[0, 3] == log.rows[1, 0] == 3
    drawing = sequence_chart(Report(2, events=events))
    (tip,) = re.findall(r"<polygon points='([\d.]+)", "".join(drawing.parts))
    assert float(tip) > drawing.width / 2  # on the side of rank 1


def swap(rank, world_size):
    words = ["zero", "one"]
    frame("Before.", {"mine": words[rank]}, step=0)
    dist.barrier()
    there = 1 - rank
    frame(
        "After.", {"other": (words[there], there)}, {"other": (there, "mine")}, step=rank + 1
    )


def test_a_brick_from_another_slot_and_steps_by_number():
    frames = film(launch(swap, 2, trace=True)).frames
    assert [drawing.text.splitlines()[1:] for drawing in frames] == [
        ["  rank 0: mine zero", "  rank 1: mine one"],
        ["  rank 0: other one", "  rank 1: mine one", "  mine into other: rank 1 → rank 0"],
        ["  rank 0: other one", "  rank 1: other zero", "  mine into other: rank 0 → rank 1"],
    ]


def join(rank, world_size):
    frame("Before.", {"sum": [rank % 2]})
    dist.barrier()
    frame("After.", {"sum": [0, 1]})


def test_an_arrow_leads_only_from_ranks_that_had_what_is_new():
    drawing = film(launch(join, 3, trace=True)).frames[-1]
    arrows = ["sum: rank 1 → rank 0", "sum: ranks 0, 2 → rank 1", "sum: rank 1 → rank 2"]
    assert sorted(line.strip() for line in drawing.text.splitlines()[-3:]) == sorted(arrows)


def work_and_send(rank, world_size):
    with span("work"):
        pass
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.irecv(torch.ones(1), 0).wait()
        note("it is here")


def test_a_film_of_any_run_shows_what_ranks_compute_and_each_message(ranks):
    frames = film(ranks(2, work_and_send, trace=True)).frames
    assert [drawing.text.splitlines() for drawing in frames] == [
        ["rank 0 computes work", "rank 1 computes work"],
        ["rank 0 → rank 1  4 B", "rank 1  it is here"],
    ]


def test_drawing_what_was_not_recorded_is_refused():
    for draw in (sequence_chart, timeline, traffic, film):
        with pytest.raises(ValueError, match="launch with trace=True"):
            draw(Report(2))
