"""A fingerprint stands for every bit of every parameter; ranks say who has another thing."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.shared.parameters import fingerprint, require_same


def mixed():
    """Layers of three dtypes, from the same seed each time."""
    torch.manual_seed(0)
    kinds = (torch.float32, torch.float64, torch.bfloat16)
    return nn.Sequential(*(nn.Linear(3, 3, dtype=kind) for kind in kinds))


@pytest.mark.parametrize("name", [name for name, _ in mixed().named_parameters()])
def test_the_last_bit_of_any_parameter_counts(name):
    changed = mixed()
    assert fingerprint(changed) == fingerprint(mixed()) and len(fingerprint(changed)) == 8
    last = changed.get_parameter(name).data.view(-1)[-1:]
    last.copy_(torch.nextafter(last, torch.full_like(last, float("inf"))))
    assert fingerprint(changed) != fingerprint(mixed())


def compare(rank, world_size, things, members=None):
    group = dist.new_group(members) if members else None
    if members is None or rank in members:
        require_same(things[rank], "shapes", "build one model", group)
    return rank


@pytest.mark.parametrize(("things", "members"), [("aaa", None), ("aab", [0, 1])])
def test_equal_things_are_taken_also_within_a_group(ranks, things, members):
    assert ranks(3, compare, things, members).results == [0, 1, 2]


@pytest.mark.parametrize(("things", "who"), [("aab", 2), ("abb", 1), ("aba", 1)])
def test_all_ranks_name_the_first_that_differs(ranks, things, who):
    said = f"rank {who} has other shapes than rank 0: build one model"
    with pytest.raises(RankFailed, match=f"ranks 0, 1 and 2 raised ValueError: {said}"):
        ranks(3, compare, things)
