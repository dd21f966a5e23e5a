"""What is asked of a group before a rank sends anything."""

import pytest
import torch.distributed as dist

from mgpu_tutorial.shared.groups import size_of


def ask(rank, world_size, group):
    return size_of(group)


@pytest.mark.parametrize("group", [[0, 1], 0, "gloo", {}])
def test_what_is_no_group_is_refused(refused, group):
    """A list of ranks, say; torch would say that it is not hashable."""
    refused(2, f"{group!r} is no process group: make one by", ask, group)


def ask_for_mine(rank, world_size):
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    return size_of(None), size_of(groups[rank % 2])


def test_a_group_has_its_own_number_of_ranks(ranks):
    assert ranks(3, ask_for_mine).results == [(3, 2), (3, 1), (3, 2)]
