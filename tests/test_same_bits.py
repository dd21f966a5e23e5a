"""Every all-reduce of our own leaves the same bits on all ranks, and every all-gather.

The numbers are random and in float32: the sums are rounded, so a rank that adds up in
another order, or hands on a difference instead of a value, ends with other bits.
"""

import pytest
import torch
from torch import nn

from mgpu_tutorial import distributed_sgd
from mgpu_tutorial.at_scale import hierarchy
from mgpu_tutorial.collectives import ring
from mgpu_tutorial.ddp_buckets import wrappers
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.sharding import training
from mgpu_tutorial.tensor_parallel import operators

RANKS = [1, 2, 3, 4, 8]
SIZES = [1, 7, 8, 1001]  # fewer numbers than ranks, no multiple of them


def numbers_of(rank, size):
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * size + rank))


def flat_ring(tensor, world_size):
    hierarchy.flat_ring(tensor, per_node=world_size)


def by_nodes(tensor, world_size):
    """Nodes of two ranks, where the ranks can be paired."""
    hierarchy.hierarchical(tensor, per_node=2 if world_size % 2 == 0 else 1)


def by_large_nodes(tensor, world_size):
    hierarchy.hierarchical(tensor, per_node=max(1, world_size // 2))


def ring_all_reduce(tensor, world_size):
    ring.ring_all_reduce(tensor)


def naive_all_reduce(tensor, world_size):
    ring.naive_all_reduce(tensor)


def sum_of(tensor, world_size):
    tensor.copy_(operators.sum_of(tensor, None))


ALL_REDUCES = [ring_all_reduce, naive_all_reduce, flat_ring, by_nodes, by_large_nodes, sum_of]


def reduce_each_size(rank, world_size, all_reduce):
    tensors = [numbers_of(rank, size) for size in SIZES]
    for tensor in tensors:
        all_reduce(tensor, world_size)
    return tensors


def require_same_bits(results):
    for rank, other in enumerate(results):
        for mine, expected in zip(other, results[0], strict=True):
            assert mine.dtype == torch.float32
            assert torch.equal(mine, expected), f"rank {rank} has other bits than rank 0"


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("all_reduce", ALL_REDUCES)
def test_an_all_reduce(ranks, all_reduce, world_size):
    results = ranks(world_size, reduce_each_size, all_reduce).results
    require_same_bits(results)
    sums = [sum(numbers_of(r, size).double() for r in range(world_size)) for size in SIZES]
    assert largest_difference(results[0], sums) < 1e-5


def gather_rows(rank, world_size):
    return [operators.gathered(numbers_of(rank, 6 * n).view(2, n, 3), None) for n in (1, 5)]


@pytest.mark.parametrize("world_size", RANKS)
def test_the_all_gather_of_sequences(ranks, world_size):
    results = ranks(world_size, gather_rows).results
    require_same_bits(results)
    parts = [[numbers_of(r, 6 * n).view(2, n, 3) for r in range(world_size)] for n in (1, 5)]
    assert all(
        torch.equal(mine, torch.cat(own, 1))
        for mine, own in zip(results[0], parts, strict=True)
    )


def new_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))


def backward_of(model, rank):
    model(numbers_of(rank, 35).view(5, 7)).square().sum().backward()


def average_by(rank, world_size, average):
    model = new_layers()
    backward_of(model, rank)
    average(model)
    return [parameter.grad for parameter in model.parameters()]


def average_in_a_wrapper(rank, world_size, wrapper):
    model = wrappers.wrap(wrapper, new_layers())
    backward_of(model, rank)
    wrappers.finish_gradient_synchronization(model)
    return [parameter.grad for parameter in model.module.parameters()]


def mean_gradients(world_size):
    every = []
    for rank in range(world_size):
        model = new_layers().double()
        model(numbers_of(rank, 35).view(5, 7).double()).square().sum().backward()
        every.append([parameter.grad for parameter in model.parameters()])
    return [torch.stack(each).mean(0) for each in zip(*every, strict=True)]


AVERAGES = [distributed_sgd.average_gradients, distributed_sgd.average_flat]


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("average", AVERAGES)
def test_averaged_gradients(ranks, average, world_size):
    results = ranks(world_size, average_by, average).results
    require_same_bits(results)
    assert largest_difference(results[0], mean_gradients(world_size)) < 1e-4


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("wrapper", wrappers.WRAPPERS)
def test_gradients_of_a_wrapper(ranks, wrapper, world_size):
    results = ranks(world_size, average_in_a_wrapper, wrapper).results
    require_same_bits(results)
    assert largest_difference(results[0], mean_gradients(world_size)) < 1e-4


def parameters_after_two_steps(rank, world_size, prepare):
    prepared = prepare(new_layers())
    for _ in range(2):
        prepared.optimizer.zero_grad()
        backward_of(prepared.model, rank)
        prepared.after_backward()
        prepared.optimizer.step()
        prepared.after_step()
    return list(prepared.whole().values())


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("stage", training.PREPARE)
def test_parameters_of_a_stage_of_sharding(ranks, stage, world_size):
    results = ranks(world_size, parameters_after_two_steps, training.PREPARE[stage]).results
    require_same_bits(results)
