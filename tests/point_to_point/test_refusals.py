"""Any tensor arrives, whatever its numbers and its order in memory, and comes back."""

import pytest
import torch

from mgpu_tutorial.point_to_point import messages

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


def test_a_swap_is_one_message_each_way_and_no_more(ranks):
    report = ranks(2, swap_twice, TENSORS["bool"], trace=True)
    for rank, calls in enumerate((["send", "recv"] * 2, ["recv", "send"] * 2)):
        assert [event.op for event in report.events if event.rank == rank] == calls
