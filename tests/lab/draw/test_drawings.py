"""The drawings show the run they are made from, and the same run looks the same."""

from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial.collectives import calls
from mgpu_tutorial.collectives.ring import reduce_by, ring_all_reduce
from mgpu_tutorial.lab import (
    RanksHung,
    film,
    launch,
    note,
    sequence_chart,
    span,
    timeline,
    traffic,
)
from mgpu_tutorial.lab.draw.sequence_chart import message_log
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.point_to_point import messages as p2p


def elements(drawing, tag):
    root = ElementTree.fromstring(drawing.svg())
    return root.findall(f".//{{http://www.w3.org/2000/svg}}{tag}")


def test_a_chart_is_the_same_from_run_to_run(ranks):
    reports = [ranks(5, calls.pairs, trace=True), launch(calls.pairs, 5, trace=True)]
    first, second = map(sequence_chart, reports)
    assert (first.svg(), repr(first)) == (second.svg(), repr(second))


def test_each_message_is_an_arrow_and_arrives_no_higher_than_it_was_sent(ranks):
    report = ranks(4, reduce_by, ring_all_reduce, 12, trace=True)
    log = message_log(report)
    assert len(log.messages) == 24 == len(elements(sequence_chart(report), "polygon"))
    assert all(log.rows[source] <= log.rows[target] for source, target in log.messages)


def test_collectives_of_different_groups_are_not_drawn_over_each_other(ranks):
    log = message_log(ranks(4, calls.pairs, trace=True))
    assert [log.rows[keys[0]] for keys in log.collectives] == [0, 1]


def test_what_was_sent_late_arrives_late():
    events = [Event(0, i, "note", i, i, note="busy") for i in range(3)]
    events += [Event(0, 3, "isend", 3, 4, peer=1), Event(1, 0, "recv", 0, 5, peer=0)]
    log = message_log(Report(2, events=events))
    assert log.messages == [((0, 3), (1, 0))] and log.rows[0, 3] == log.rows[1, 0] == 3


def test_a_deadlock_is_drawn_with_its_open_ends():
    with pytest.raises(RanksHung) as caught:
        launch(p2p.both_send_first, 2, timeout=1, trace=True)
    chart = sequence_chart(caught.value.report)
    assert [text.text for text in elements(chart, "text")].count("?") == 2
    waits = [f"rank {rank} waits in send for rank {1 - rank}" for rank in (0, 1)]
    assert repr(chart).splitlines() == waits
    texts = [frame.text.splitlines() for frame in film(caught.value.report).frames]
    assert texts == [waits[:1], waits]


def work_and_send(rank, world_size):
    with span("work"):
        pass
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.irecv(torch.ones(1), 0).wait()
        note("it is here")


def test_a_film_of_any_run_shows_what_ranks_compute_and_each_message(ranks):
    assert [
        frame.text.splitlines() for frame in film(ranks(2, work_and_send, trace=True)).frames
    ] == [
        ["rank 0 computes work", "rank 1 computes work"],
        ["rank 0 → rank 1  4 B", "rank 1  it is here"],
    ]


def test_drawing_what_was_not_recorded_is_refused():
    for draw in (sequence_chart, timeline, traffic, film):
        with pytest.raises(ValueError, match="launch with trace=True"):
            draw(Report(2))


def test_traffic_counts_calls_messages_and_bytes(ranks):
    table = traffic(ranks(3, p2p.pass_along, trace=True), expected=4, formula="one float")
    assert table.rows[1] == ["rank 1", "1 recv, 1 send", 1, 4, 4, "1.000"]
    assert "<td" in table._repr_html_() and "rank 2" in repr(table)
