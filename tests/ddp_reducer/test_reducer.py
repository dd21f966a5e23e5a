"""What torch's Reducer does with buckets, seen through a communication hook."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.experiments import Tower, shares, train_replicas
from mgpu_tutorial.ddp_reducer import reducer
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


OPTIONS = ["gradient_as_bucket_view", "static_graph", "find_unused_parameters"]


@pytest.mark.parametrize("options", [{}, *({name: True} for name in OPTIONS)], ids=str)
def test_no_option_changes_what_is_learned(ranks, options):
    for found in ranks(3, train_replicas, DistributedDataParallel, 4, **options).results:
        torch.testing.assert_close(found, one_process(4))
