"""A network that we set: real messages that take the time we say, and no processor."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial.shared.slow_link import slow_link

NAMES = ("all_reduce", "all_gather_single", "reduce_scatter_single")


def test_outside_nothing_is_slow():
    before = [getattr(dist, name) for name in NAMES]
    with pytest.raises(KeyError), slow_link(lambda nbytes: 1.0):
        raise KeyError
    assert [getattr(dist, name) for name in NAMES] == before


def take_halves(rank, world_size):
    """For how long the link sleeps where it takes 0.1 s a byte, for one call at a time."""
    slept, nap, wire = [], time.sleep, threading.Lock()

    def sleep(seconds):
        assert wire.acquire(blocking=False)
        nap(0.05)
        wire.release()
        slept.append(seconds)

    time.sleep = sleep
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


@pytest.mark.parametrize("trace", [False, True])
def test_each_half_of_an_all_reduce_takes_half_its_time(ranks, trace):
    report = ranks(2, take_halves, trace=trace)
    for slept, values in report.results:
        assert slept == [1.6, 0.8, 0.8]  # in the order of the calls
        assert values == [[2.0] * 4, [1.0] * 4, [2.0] * 2]
    calls = [e.op for e in report.events if e.kind == "collective" and e.rank == 0]
    assert sorted(calls) == (sorted(NAMES) if trace else [])  # each once


def loses_its_peer(rank, world_size):
    if rank == 1:
        return None
    with slow_link(lambda nbytes: 0.0):
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            return type(error).__name__


def test_the_loss_of_a_peer_reaches_whoever_waits(ranks):
    assert ranks(2, loses_its_peer).results == ["RuntimeError", None]
