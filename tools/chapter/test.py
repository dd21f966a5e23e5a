"""The ranks compute what one process computes, and mistakes are as described."""

import pytest

from mgpu_tutorial import new_topic as ch
from mgpu_tutorial.lab import RankFailed, launch


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_has_the_mean(world_size):
    assert launch(ch.mean, world_size).results == [ch.alone(world_size)] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_number_moves_up_by_one_rank(world_size):
    found = launch(ch.neighbour, world_size).results
    assert found == [(rank - 1) % world_size for rank in range(world_size)]


def test_a_rank_that_stays_away_is_named():
    with pytest.raises(RankFailed, match="rank 0 returned while rank 1 still waited"):
        launch(ch.one_stays_away, 2, timeout=10)
