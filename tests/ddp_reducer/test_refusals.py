"""The hooks average odd modules, in any dtype, and over their own group alone."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_reducer import hooks, reducer


def step(rank, world_size, hook, state, make=lambda: nn.Linear(3, 2)):
    """This rank's own gradients, and the mean through the hook."""
    torch.manual_seed(0)
    model = DistributedDataParallel(make())
    model.register_comm_hook(state, hook)
    shares = torch.randn(world_size, 4, 3)
    with model.no_sync():
        model(shares[rank]).square().sum().backward()
    own = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(shares[rank]).square().sum().backward()
    return own, [p.grad for p in model.parameters()]


def signs(gradient):
    return gradient.sign() * gradient.abs().mean()


def without_bias():
    return nn.Linear(3, 2, bias=False)


def tied():
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    return module


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("hook", [hooks.as_signs, hooks.signs_with_feedback])
@pytest.mark.parametrize("make", [without_bias, tied])
def test_odd_modules_get_the_mean_of_the_signs(ranks, world_size, hook, make):
    state = {} if hook is hooks.signs_with_feedback else None
    results = ranks(world_size, step, hook, state, make).results
    for index in range(len(results[0][0])):
        expected = torch.stack([signs(own[index]) for own, _ in results]).mean(0)
        for _, found in results:
            torch.testing.assert_close(found[index], expected)


def average_in_float64(rank, world_size):
    model = DistributedDataParallel(nn.Linear(3, 1, bias=False).double())
    seen = reducer.note_buckets(model)
    model(torch.full((1, 3), 1.0 + rank).double()).sum().backward()
    return model.module.weight.grad, seen


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_hook_that_notes_keeps_the_dtype(ranks, world_size):
    mean = torch.full((1, 3), (1 + world_size) / 2, dtype=torch.float64)
    for found, seen in ranks(world_size, average_in_float64).results:
        torch.testing.assert_close(found, mean)
        assert seen == [[["weight"]]]


def mean_in_its_group(rank, world_size, hook):
    """In groups {0, 2} and {1, 3} rank r has gradient 8 (r + 1): the mean."""
    groups = [dist.new_group([first, first + 2]) for first in (0, 1)]
    group = groups[rank % 2]
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=group)
    if hook is hooks.signs_with_feedback:
        model.register_comm_hook({}, lambda rest, bucket: hook(rest, bucket, group))
    elif hook is reducer.note_buckets:
        hook(model)
    else:
        model.register_comm_hook(group, hook)
    model(torch.full((1, 1), 8.0 * (rank + 1))).sum().backward()
    return model.module.weight.grad.item()


@pytest.mark.parametrize(
    "hook",
    [hooks.as_bfloat16, hooks.as_signs, hooks.signs_with_feedback, reducer.note_buckets],
)
def test_a_hook_averages_over_its_group_alone(ranks, hook):
    assert ranks(4, mean_in_its_group, hook).results == [16.0, 24.0] * 2


def note_twice(rank, world_size):
    model = DistributedDataParallel(nn.Linear(3, 1))
    reducer.note_buckets(model)
    reducer.note_buckets(model)


def test_two_hooks_are_refused_by_torch(refused):
    refused(2, "can only be called once", note_twice, sent=True)
