"""All-reduce of whole numbers, and how the methods are timed."""

import pytest
import torch

from mgpu_tutorial.collectives import figures, ring


def add_up_whole_numbers(rank, world_size, method):
    tensor = torch.full((5,), 2**40 + rank)
    method(tensor)
    return tensor.tolist()


@pytest.mark.parametrize("method", [ring.ring_all_reduce, ring.naive_all_reduce])
def test_whole_numbers_stay_whole(ranks, method):
    """More bits than a float32 has."""
    assert ranks(3, add_up_whole_numbers, method).results == [[3 * 2**40 + 3] * 5] * 3


def time_each_once(rank, world_size):
    def in_turns(actions, *_, **__):
        return {method: [0.5, action() or 0.25] for method, action in actions.items()}

    figures.in_turns = in_turns
    return figures.turns(rank, world_size, (ring.naive_all_reduce,))


def test_of_each_method_the_least_time_until_the_slowest_rank_has_done_it_is_shown(ranks):
    report = ranks(2, time_each_once, trace=True)
    assert report.results[0] == [[size, 250.0] for size in ("4,000", "400,000", "20,000,000")]
    sent = [event.nbytes for event in report.events if event.rank == 1 and event.sends]
    assert sent == [4_000, 400_000, 20_000_000]
    assert [e.op for e in report.events if e.rank == 1][2::3] == ["barrier"] * 3
