"""What is sent is what arrives, and the mistakes are the ones we describe."""

import time

import pytest

from mgpu_tutorial.point_to_point import messages


def calls_of(report, rank):
    """What a rank called, in order: the operation and the other rank."""
    return [(event.op, event.peer) for event in report.events if event.rank == rank]


@pytest.mark.parametrize("world_size", [2, 3])
def test_rank_1_ends_with_the_value_of_rank_0_and_no_other_rank_takes_part(ranks, world_size):
    report = ranks(world_size, messages.blocking, trace=True, timeout=5)
    silent = ["before: 0\nafter:  0\n"] * (world_size - 2)
    assert report.stdout == ["before: 1\nafter:  1\n", "before: 0\nafter:  1\n", *silent]
    calls = [calls_of(report, rank) for rank in range(world_size)]
    assert calls == [[("send", 1)], [("recv", 0)], []][:world_size]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_messages_from_anybody_are_told_apart(ranks, world_size):
    report = ranks(world_size, messages.from_anybody, trace=True)
    expected = {rank: rank**2 for rank in range(1, world_size)}
    assert report.stdout == [f"{expected}\n", *[""] * (world_size - 1)]
    assert sorted(calls_of(report, 0)) == [("recv", rank) for rank in expected]


def test_tags_tell_two_messages_apart(ranks):
    report = ranks(2, messages.tags, trace=True)
    assert report.stdout == ["", "tag 2: 20\ntag 1: 10\n"]
    assert [op for op, _ in calls_of(report, 0)] == ["isend", "isend", "wait", "wait"]


def rank_1_is_late(rank, world_size):
    time.sleep(0.5 if rank == 1 else 0)
    messages.from_anybody(rank, world_size)


def test_who_comes_first_is_taken_first(ranks):
    assert calls_of(ranks(3, rank_1_is_late, trace=True), 0) == [("recv", 2), ("recv", 1)]


@pytest.mark.parametrize("delay, busy, elements", [(0.5, 0, 1), (0.5, 0, 10**6), (0, 0.5, 1)])
def test_a_send_lasts_until_the_receiver_asks_and_not_until_it_waits(
    ranks, delay, busy, elements
):
    events = ranks(2, messages.late_receiver, delay, busy, elements, trace=True).events
    send, ask, wait = ([e for e in events if e.op == o][0] for o in ("send", "irecv", "wait"))
    assert send.nbytes == ask.nbytes == 4 * elements
    assert send.begin < ask.begin < send.end if delay else send.end < wait.begin
    assert wait.begin - ask.begin >= busy
