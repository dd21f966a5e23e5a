"""What belongs to whom, without any rank: flat tensors and their shards."""

from unittest.mock import patch

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as some

from mgpu_tutorial.sharding import zero
from mgpu_tutorial.sharding.blocks import views_of

SIZES = some.lists(some.integers(1, 9), min_size=1, max_size=8)


@given(SIZES, some.integers(1, 5))
def test_shards_are_equal_and_make_the_whole(sizes, ranks):
    total, shards = sum(sizes), []
    parts = torch.arange(1.0, total + 1).split(sizes)
    for rank in range(ranks):
        with patch.multiple(dist, get_world_size=lambda: ranks, get_rank=lambda r=rank: r):
            flat = zero.flatten(parts)
            shards.append(zero.shard_of(flat))
    assert {len(shard) for shard in shards} == {-(-total // ranks)}
    padding = [0.0] * (ranks * len(shards[0]) - total)
    assert torch.cat(shards).tolist() == [*range(1, total + 1), *padding]
    views = views_of(flat, {f"{i}": part.shape for i, part in enumerate(parts)})
    assert all(torch.equal(views[f"{i}"], part) for i, part in enumerate(parts))
    assert {view.untyped_storage().data_ptr() for view in views.values()} == {flat.data_ptr()}
