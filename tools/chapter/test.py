"""The ranks compute what one process computes, and mistakes are as described."""

import pytest

from mgpu_tutorial import new_topic as ch
from mgpu_tutorial.lab import RankFailed


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_has_the_mean(ranks, world_size):
    assert (
        ranks(world_size, ch.mean).results
        == [sum(range(world_size)) / world_size] * world_size
    )


def test_a_rank_that_stays_away_is_named(ranks):
    with pytest.raises(RankFailed, match="rank 0 returned while rank 1 still waited"):
        ranks(2, ch.one_stays_away, timeout=10)
