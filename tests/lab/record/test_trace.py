"""The trace of a launch: what it sees of each call."""

import inspect
import threading
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial.lab import RankFailed, note, span
from mgpu_tutorial.lab.record import trace
from mgpu_tutorial.lab.record.source_lines import SourceLine
from mgpu_tutorial.shared.slow_link import slow_link


def test_every_call_of_this_pytorch_that_can_be_asynchronous_is_recorded():
    known = {*trace.POINT_TO_POINT, *trace.COLLECTIVES}
    theirs = {
        name
        for name, call in inspect.getmembers_static(dist, inspect.isfunction)
        if name[0] != "_" and "async_op" in inspect.signature(call).parameters
    }
    assert {name for name in theirs if "coalesced" not in name} <= known


def talk(rank, world_size):
    with span("a step"):
        note("begins")
        if rank == 0:
            dist.send(torch.ones(3), dst=1, tag=7)
        else:
            dist.recv(torch.ones(3), src=0, tag=7)
    dist.all_reduce(torch.ones(2), async_op=True).wait()


def lists(rank, world_size):
    mine, several = torch.ones(5), [torch.zeros(5) for _ in range(world_size)]
    dist.all_gather(several, mine)
    dist.all_to_all(several, [torch.ones(5) for _ in range(world_size)])
    dist.scatter(mine, several if rank == 0 else None, src=0)
    dist.reduce_scatter(mine, several, async_op=True).wait()
    pair = dist.new_group([1, 2])
    if rank in (1, 2):
        dist.broadcast(mine, group=pair, group_src=1)


def fails_in_a_span(rank, world_size):
    with suppress(ZeroDivisionError), span("a step"):
        rank / 0
    note("after it")


def test_a_span_that_fails_ends_too(ranks):
    step, remark = ranks(1, fails_in_a_span, device="cpu", trace=True).events
    assert step.end is not None and step.end <= remark.begin


def test_an_event_has_its_peer_its_tag_its_bytes_and_its_place_in_the_span(ranks):
    report = ranks(2, talk, device="cpu", trace=True)
    for rank, p2p in enumerate(["send", "recv"]):
        mine = [event for event in report.events if event.rank == rank]
        assert [event.op for event in mine] == ["span", "note", p2p, "all_reduce", "wait"]
        step, remark, message, reduce, wait = mine
        assert (message.peer, message.tag, message.nbytes) == (1 - rank, 7, 12)
        assert (reduce.group, reduce.nbytes, wait.of) == ((0, 1), 8, reduce.index)
        assert step.begin <= remark.begin <= message.begin <= message.end <= step.end
        assert reduce.begin <= reduce.end and reduce.begin <= reduce.done
        assert (step.note, remark.note) == ("a step", "begins")
        assert [event.kind for event in mine[1:]] == ["note", "p2p", "collective", "wait"]


def test_a_list_of_tensors_counts_all_of_them_and_a_peer_is_a_rank_of_the_world(ranks):
    events = ranks(3, lists, device="cpu", trace=True).events
    nbytes = {(event.op, event.rank): event.nbytes for event in events}
    assert nbytes["all_gather", 1] == nbytes["all_to_all", 2] == 3 * 20
    assert nbytes["scatter", 1] == 20
    assert all(event.done for event in events if event.op == "reduce_scatter")
    # rank 2 is number 1 of its group
    assert {(e.rank, e.peer) for e in events if e.op == "broadcast"} == {(1, 2), (2, 2)}


def talk_in_threads(rank, world_size, seconds):
    groups = [dist.new_group([0, 1]) for _ in range(2)]

    def reduce(group):
        for _ in range(20):
            dist.all_reduce(torch.ones(3), group=group)

    threads = [threading.Thread(target=reduce, args=[group]) for group in groups]
    with slow_link(lambda nbytes: seconds) if seconds else nullcontext():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def receive_from_anybody(rank, world_size):
    if rank == 0:
        return dist.recv(torch.zeros(1))
    return dist.send(torch.ones(1), dst=0)


@pytest.mark.parametrize("seconds", [0.0, 0.002])
def test_a_call_of_each_thread_is_recorded_once(ranks, seconds):
    events = ranks(2, talk_in_threads, seconds, device="cpu", trace=True).events
    for rank in range(2):
        mine = [event for event in events if event.rank == rank]
        assert [event.op for event in mine] == ["all_reduce"] * 40
        assert [event.index for event in mine] == list(range(40))
        assert all(event.end for event in mine)


def test_who_sent_is_known_once_a_receive_from_anybody_is_over(ranks):
    report = ranks(2, receive_from_anybody, device="cpu", trace=True)
    (receive,) = (event for event in report.events if event.op == "recv")
    assert report.results[0] == receive.peer == 1


def drops(rank, world_size):
    if rank == 0:
        kept = dist.isend(torch.ones(3), dst=1)
        kept.wait()
        dist.isend(torch.ones(3), dst=1)  # nobody has its work
    else:
        dist.recv(torch.zeros(3), src=0)
        dist.recv(torch.zeros(3), src=0)


def test_a_transfer_that_nobody_waited_for_has_its_line_and_is_named(ranks):
    code = drops.__code__
    try:
        events = ranks(2, drops, device="cpu", trace=True, timeout=20).events
    except (
        RankFailed
    ) as failed:  # the transfer may have been faster than the loss of its work
        events = failed.report.events
        place = f"{Path(__file__).name}:{code.co_firstlineno + 4}"
        assert f"\n  rank 0 never waited for the isend at {place}  dist.isend(" in str(failed)
    kept, lost = (event for event in events if event.op == "isend")
    assert kept.dropped is None and lost.end <= lost.dropped
    lines = [SourceLine(*event.at) for event in (kept, lost)]
    assert [line.line - code.co_firstlineno for line in lines] == [2, 4]
    assert {line.file for line in lines} == {__file__}
    others = [event for event in events if event.op in ("recv", "wait")]
    assert {(event.at, event.dropped) for event in others} == {((), None)}
