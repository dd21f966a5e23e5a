"""The ring, and how it is timed."""

from types import SimpleNamespace

import pytest
import torch

from mgpu_tutorial.collectives import figures, ring


def reduce_numbers(rank, world_size, count):
    ring.ring_all_reduce(torch.full((count,), float(rank)))


@pytest.mark.parametrize("count, world_size", [(5, 1), (11, 3), (2, 4), (12, 4)])
def test_a_rank_of_the_ring_sends_all_chunks_but_one_to_the_right_twice(
    ranks, count, world_size
):
    """First all but the one that it finishes, then all but the one that is finished next."""
    report = ranks(world_size, reduce_numbers, count, trace=True)
    chunks = [4 * len(chunk) for chunk in torch.arange(count).tensor_split(world_size)]
    steps = 2 * (world_size - 1)
    for rank in range(world_size):
        mine = [event for event in report.events if event.rank == rank]
        right = (rank + 1) % world_size
        order = [chunks[(rank - step) % world_size] for step in range(steps)]
        assert [(e.peer, e.nbytes) for e in mine if e.sends] == [(right, n) for n in order]
        assert [e.op for e in mine] == ["isend", "recv", "wait"] * steps


def add_up_whole_numbers(rank, world_size, method):
    tensor = torch.full((5,), 2**40 + rank)
    method(tensor)
    return tensor.tolist()


@pytest.mark.parametrize("method", [ring.ring_all_reduce, ring.naive_all_reduce])
def test_whole_numbers_stay_whole(ranks, method):
    """More bits than a float32 has."""
    assert ranks(3, add_up_whole_numbers, method).results == [[3 * 2**40 + 3] * 5] * 3


def time_each_once(rank, world_size):
    figures.in_turns = lambda actions, *_, **__: {m: [act()] for m, act in actions.items()}
    figures.turns(rank, world_size, (ring.naive_all_reduce,))


def test_a_method_is_timed_until_the_slowest_rank_has_done_it(ranks):
    events = ranks(2, time_each_once, trace=True).events
    for rank in range(2):  # at each of three sizes two messages, and then all meet
        assert [e.op for e in events if e.rank == rank][2::3] == ["barrier"] * 3


def test_of_a_method_the_least_time_is_shown(monkeypatch):
    """A disturbance of the machine only adds to a time."""
    taken = {4_000: [[0.003, 0.002, 0.009], [0.5, 0.1, 0.4]], 400_000: [[0.2], [0.3]]}
    report = SimpleNamespace(results=[taken])
    monkeypatch.setattr(figures, "launch", lambda *given, **more: report)
    table = figures.race(ring.ring_all_reduce, ring.naive_all_reduce)
    assert table.rows == [["4,000", 2.0, 100.0], ["400,000", 200.0, 300.0]]
