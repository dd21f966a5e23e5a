"""A network that we set: real messages that take the time we say, and no processor."""

import time

import pytest
import torch.distributed as dist

from mgpu_tutorial.lab import launch, timeline
from tests.lab import ranks


@pytest.mark.parametrize("trace", [False, True])
def test_an_all_reduce_takes_its_time_and_gives_the_sum(trace):
    report = launch(ranks.time_a_slow_link, 2, 0.05, trace=trace)
    for waiting, asynchronous in report.results:
        called, complete, values = waiting
        assert called >= 0.05 and values == [1.0] * 3
        called, complete, values = asynchronous
        assert called < complete and complete >= 0.05 and values == [1.0] * 3
    if trace:
        calls = [e for e in report.events if e.op == "all_reduce"]
        assert [e.done is None for e in calls if e.rank == 0] == [True, False]
        assert all(e.done - e.begin >= 0.05 for e in calls if e.done)
        names = "waiting, all_reduce, asynchronous"
        assert repr(timeline(report)) == f"timeline of 2 ranks, 8 intervals: {names}"


def test_outside_nothing_is_slow():
    names = ("all_reduce", "all_gather_single", "reduce_scatter_single")
    before = [getattr(dist, name) for name in names]
    from mgpu_tutorial.lab import slow_link

    with pytest.raises(KeyError), slow_link(lambda nbytes: 1.0):
        for name, real in zip(names, before, strict=True):
            assert getattr(dist, name) is not real
        raise KeyError
    assert [getattr(dist, name) for name in names] == before


@pytest.mark.parametrize("trace", [False, True])
def test_each_half_of_an_all_reduce_takes_half_its_time(trace):
    report = launch(take_halves, 2, trace=trace)
    for slept, values in report.results:
        assert slept == [1.6, 0.8, 0.8]
        assert values == [[2.0] * 4, [1.0] * 4, [2.0] * 2]
    if trace:
        names = {"all_reduce", "all_gather_single", "reduce_scatter_single"}
        assert {e.op for e in report.events if e.kind == "collective"} == names


def take_halves(rank, world_size):
    """How long the link sleeps for an all_reduce of 16 bytes and for each of its halves."""
    import torch

    from mgpu_tutorial.lab import slow_link

    slept = []
    time.sleep = slept.append
    summed, gathered, mine = torch.ones(4), torch.empty(4), torch.empty(2)
    with slow_link(lambda nbytes: nbytes / 10):
        works = [
            dist.all_reduce(summed, async_op=True),
            dist.all_gather_single(gathered, torch.ones(2), async_op=True),
            dist.reduce_scatter_single(mine, torch.ones(4), async_op=True),
        ]
        for work in works:
            work.wait()
    return slept, [summed.tolist(), gathered.tolist(), mine.tolist()]


def test_messages_go_one_after_the_other():
    report = launch(in_a_row, 2)
    for seconds in report.results:
        assert seconds >= 3 * 0.03


def in_a_row(rank, world_size):
    import torch

    from mgpu_tutorial.lab import slow_link

    with slow_link(lambda nbytes: nbytes * 0.03 / 4):  # 30 ms for one float32
        begin = time.perf_counter()
        works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        return time.perf_counter() - begin
