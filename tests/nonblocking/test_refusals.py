"""Two ranks for one transfer, and neighbours for an exchange; nothing else is tried."""

import pytest
import torch

from mgpu_tutorial.nonblocking import transfers


def work_alone(rank, world_size):
    return transfers.work_meanwhile(torch.ones(1), lambda: "done")


TWO_RANKS = [
    (transfers.start_and_wait, 0.1),
    (transfers.overwrite_early, 0, 0),
    (work_alone,),
]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("call", TWO_RANKS, ids=lambda call: call[0].__name__)
def test_a_transfer_from_rank_0_to_rank_1_takes_two_ranks(count, call, refused):
    refused(count, f"2 ranks, got {count}", *call)


def test_one_rank_has_no_neighbours(refused):
    refused(1, "no neighbours", transfers.exchange_with_neighbours)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_what_goes_right_comes_from_the_left(count, ranks):
    expected = [[100 + (r - 1) % count, 200 + (r + 1) % count] for r in range(count)]
    assert ranks(count, transfers.exchange_with_neighbours).results == expected
