"""What cannot be sent is refused on every rank; any other tensor arrives, and comes back."""

import pytest
import torch

from mgpu_tutorial.point_to_point import messages

ONE = torch.ones(1)
TWO_RANKS = [
    (messages.into_buffer, ONE, ONE),
    (messages.tags,),
    (messages.late_receiver, 0.1),
]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("call", TWO_RANKS, ids=lambda call: call[0].__name__)
def test_a_message_from_rank_0_to_rank_1_takes_two_ranks(count, call, refused):
    refused(count, f"2 ranks, got {count}", *call)


def swap_with(rank, world_size, peer):
    return messages.swap(torch.ones(1), rank if peer == "itself" else peer)


@pytest.mark.parametrize("peer", ["itself", -1, 2, None])
def test_swap_needs_another_rank(peer, refused):
    refused(2, "the number of another rank", swap_with, peer)


TENSORS = {
    "transposed": lambda rank: torch.arange(6.0).view(2, 3).t() + rank,
    "strided": lambda rank: (torch.arange(8) + 10 * rank)[::2],
    "transposed on one rank": lambda rank: (
        torch.arange(4).view(2, 2).t() if rank else torch.arange(4).view(2, 2)
    ),
    "a number": torch.tensor,
    "empty": lambda rank: torch.zeros(0, 3),
    "bool": lambda rank: torch.tensor([rank == 0, True]),
    "float16": lambda rank: torch.full((3,), rank + 0.5).half(),
    "bfloat16": lambda rank: torch.full((3,), rank + 0.5).bfloat16(),
    "float64": lambda rank: torch.full((3,), rank + 0.1, dtype=torch.float64),
}


def swap_twice(rank, world_size, make):
    mine = make(rank)
    before = mine.clone()
    other = messages.swap(mine, 1 - rank)
    assert torch.equal(mine, before)
    return other, messages.swap(other, 1 - rank)


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_a_tensor_arrives_whatever_its_layout_and_comes_back(make, ranks):
    for rank, (other, back) in enumerate(ranks(2, swap_twice, make, timeout=5).results):
        torch.testing.assert_close(other, make(1 - rank), rtol=0, atol=0, check_stride=False)
        torch.testing.assert_close(back, make(rank), rtol=0, atol=0, check_stride=False)
