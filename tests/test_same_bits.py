"""Every all-reduce of our own leaves the same bits on all ranks.

The numbers are random and in float32: the sums are rounded, so a rank that adds up in
another order, or hands on a difference instead of a value, ends with other bits. That the
sums are right is tested in the chapters.
"""

import pytest
import torch
from torch import nn

from mgpu_tutorial.collectives.ring import naive_all_reduce, ring_all_reduce
from mgpu_tutorial.ddp_buckets.experiments import WRAPPERS, finish_gradient_synchronization
from mgpu_tutorial.distributed_sgd.sgd import average_gradients
from mgpu_tutorial.sharding.stages import full_parameters, prepare
from mgpu_tutorial.tensor_parallel.layers import sum_of

every_number_of_ranks = pytest.mark.parametrize("world_size", [3, 4])
SIZES = [1, 7, 8, 1001]  # fewer numbers than ranks, no multiple of them
ALL_REDUCES = {
    "ring": lambda tensor, _: ring_all_reduce(tensor),
    "naive": lambda tensor, _: naive_all_reduce(tensor),
    "sum_of": lambda tensor, _: tensor.copy_(sum_of(tensor, None)),
}


def numbers_of(rank, size):
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * size + rank))


def require_same_bits(results):
    for rank, other in enumerate(results):
        for mine, expected in zip(other, results[0], strict=True):
            assert mine.dtype == torch.float32
            assert torch.equal(mine, expected), f"rank {rank} has other bits than rank 0"


def reduce_each_size(rank, world_size, all_reduce):
    tensors = [numbers_of(rank, size) for size in SIZES]
    for tensor in tensors:
        all_reduce(tensor, world_size)
    return tensors


@every_number_of_ranks
@pytest.mark.parametrize("name", ALL_REDUCES)
def test_an_all_reduce(ranks, name, world_size):
    require_same_bits(ranks(world_size, reduce_each_size, ALL_REDUCES[name]).results)


def backward_of(model, rank):
    model(numbers_of(rank, 35).view(5, 7)).square().sum().backward()


def new_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))


def average_by(rank, world_size, average):
    """The averaged gradients, by a function or by a wrapper."""
    model = wrapped = new_layers()
    if average in WRAPPERS:
        wrapped, average = average(model), finish_gradient_synchronization
    backward_of(wrapped, rank)
    average(wrapped)
    return [parameter.grad for parameter in model.parameters()]


@every_number_of_ranks
@pytest.mark.parametrize("average", [average_gradients, *WRAPPERS])
def test_averaged_gradients(ranks, average, world_size):
    require_same_bits(ranks(world_size, average_by, average).results)


def parameters_after_two_steps(rank, world_size, stage):
    prepared = prepare(stage, new_layers())
    for _ in range(2):
        prepared.model.zero_grad()
        backward_of(prepared.model, rank)
        prepared.step()
    return list(full_parameters(prepared.model).values())


@every_number_of_ranks
@pytest.mark.parametrize("stage", range(4))
def test_parameters_of_a_stage_of_sharding(ranks, stage, world_size):
    require_same_bits(ranks(world_size, parameters_after_two_steps, stage).results)
