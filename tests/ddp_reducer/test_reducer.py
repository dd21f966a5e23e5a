"""What torch's Reducer sends and when: who complains, who waits, and what each cure gives."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.experiments import Tower, shares
from mgpu_tutorial.ddp_reducer import reducer
from mgpu_tutorial.lab import RankFailed
from tests.ddp_buckets.test_wrappers import one_process


def train_while_noting(rank, world_size):
    model = DistributedDataParallel(Tower())
    iterations = reducer.note_buckets(model)
    (batch,) = shares(rank, world_size, 1, width=64)
    model(batch).square().mean().backward()
    return [p.grad for p in model.parameters()], len(iterations)


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_hook_that_notes_averages_as_ddp_does(ranks, world_size):
    for gradients, iterations in ranks(world_size, train_while_noting).results:
        torch.testing.assert_close(gradients, one_process(1)[0])
        assert iterations == 1


NOBODY, FIRST_ONLY, SECOND_ONLY = (None, None), (1.0, None), (None, 1.0)


@pytest.mark.parametrize(
    "option, second, gradient",
    [
        ("find_unused_parameters", SECOND_ONLY, 2.0),  # the mean of none and 4
        ("static_graph", FIRST_ONLY, 1.0),  # of 2 and none, as long as it stays so
    ],
)
def test_the_ranks_may_use_different_parameters(ranks, option, second, gradient):
    report = ranks(2, reducer.train_two_heads, second, 3, **{option: True})
    assert report.results == [[3.0, gradient]] * 2


def test_in_the_next_step_the_other_rank_raises(ranks):
    says = "rank 1 raised RuntimeError: Expected to have"
    with pytest.raises(RankFailed, match=says) as caught:
        ranks(2, reducer.train_two_heads, FIRST_ONLY)
    assert caught.value.report.stdout[0] == "forward 0 done\n"


def use_in_turn(rank, world_size, *seconds):
    """Steps that use the second head or not, against the promise of a static graph."""
    model = DistributedDataParallel(reducer.TwoHeads(), static_graph=True)
    for second in seconds:
        model(torch.ones(2, 4), second[rank]).sum().backward()


@pytest.mark.parametrize(
    "first, then, says",
    [
        (NOBODY, (1.0, 1.0), "Your training graph has changed in this iteration"),
        ((1.0, 1.0), FIRST_ONLY, "rank 1 returned while rank 0 still waited"),
    ],
)
def test_a_broken_promise_of_a_static_graph_is_told_or_hangs(ranks, first, then, says):
    with pytest.raises(RankFailed, match=says):
        ranks(2, use_in_turn, first, first, then, timeout=10)
