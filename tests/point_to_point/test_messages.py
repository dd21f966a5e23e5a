"""Who takes part in a message, and whose message is taken first."""

import time

from mgpu_tutorial.point_to_point import messages


def calls_of(report, rank):
    """What a rank called, in order: the operation and the other rank."""
    return [(event.op, event.peer) for event in report.events if event.rank == rank]


def test_rank_1_ends_with_the_value_of_rank_0_and_no_other_rank_takes_part(ranks):
    report = ranks(3, messages.blocking, trace=True, timeout=5)
    ends = [said.splitlines()[-1] for said in report.stdout]
    assert ends == ["after:  1", "after:  1", "after:  0"]
    calls = [calls_of(report, rank) for rank in range(3)]
    assert calls == [[("send", 1)], [("recv", 0)], []]


def rank_1_is_late(rank, world_size):
    time.sleep(0.5 if rank == 1 else 0)
    messages.from_anybody(rank, world_size)


def test_who_comes_first_is_taken_first(ranks):
    assert calls_of(ranks(3, rank_1_is_late, trace=True), 0) == [("recv", 2), ("recv", 1)]
