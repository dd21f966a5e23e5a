"""ZeRO 3 by blocks: when a block is whole, and when it is on its way."""

import re
import time

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from mgpu_tutorial.lab import note
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.sharding import zero
from mgpu_tutorial.sharding.blocks import (
    PrefetchingBlock,
    ShardedBlock,
    fully_sharded,
    linked,
)


def new_layers():
    """Three layers that no number of ranks divides; before the last a GELU of its own."""
    torch.manual_seed(0)
    last = nn.Sequential(nn.GELU(), nn.Linear(7, 9))
    return [layer.double() for layer in (nn.Linear(3, 5), nn.Linear(5, 7), last)]


def inputs(rank, world_size):
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).double()
    return x.chunk(world_size)[rank]


def three_steps(model, rank, world_size):
    """What the model makes of the whole batch after three steps on this rank's share."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs(rank, world_size)).square().mean().backward()
        optimizer.step()
    return model(inputs(0, 1)).detach()


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("way", ["parameters", "recomputed", ShardedBlock, PrefetchingBlock])
def test_layers_are_trained_as_in_one_process(ranks, way, world_size):
    def train_shards(rank, world_size):
        layers = new_layers()
        if isinstance(way, type):
            return three_steps(linked([way(layer) for layer in layers]), rank, world_size)
        for layer in layers:
            zero.shard_parameters(layer)
            if way == "recomputed":
                zero.recompute(layer)
        return three_steps(nn.Sequential(*layers), rank, world_size)

    expected = three_steps(nn.Sequential(*new_layers()), 0, 1)
    found = ranks(world_size, train_shards).results
    assert largest_difference(found, [expected] * world_size) < 1e-14


def are_freed(memories):
    """Is all of it given back? A thread of the process group may let go a little later."""
    limit = time.monotonic() + 5
    while not all(memory.expired() for memory in memories) and time.monotonic() < limit:
        time.sleep(0.01)
    return all(memory.expired() for memory in memories)


@pytest.mark.parametrize("kind", [ShardedBlock, PrefetchingBlock])
def test_nobody_keeps_a_gathered_weight(ranks, kind):
    def watch_gathered(rank, world_size):
        model, seen = linked([kind(layer) for layer in new_layers()]), []
        for linear in [part for part in model.modules() if isinstance(part, nn.Linear)]:
            linear.register_forward_pre_hook(
                lambda layer, _: seen.append(StorageWeakRef(layer.weight.untyped_storage()))
            )
        loss = model(inputs(rank, world_size)).sum()
        after_forward = are_freed(seen)
        loss.backward()
        return len(seen), after_forward, are_freed(seen)

    assert ranks(2, watch_gathered).results == [(3, True, True)] * 2


def take_a_step(rank, world_size, kind):
    """Three layers note when they have computed and when their backward begins."""
    made = [nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 9)]
    for i, layer in enumerate(made):
        layer.register_forward_hook(lambda *_, i=i: note(f"forward {i}"))
        layer.register_full_backward_pre_hook(lambda *_, i=i: note(f"backward {i}"))
    model = linked([kind(layer) for layer in made])
    model(torch.ones(2, 3, requires_grad=True)).sum().backward()


WHEN_NEEDED = """gather 0, forward 0, gather 1, forward 1, gather 2, forward 2,
    backward 2, gather 2, scatter 2, backward 1, gather 1, scatter 1, backward 0, gather 0,
    scatter 0"""
ONE_AHEAD = """gather 0, gather 1, forward 0, gather 2, forward 1, forward 2,
    backward 2, gather 2, gather 1, scatter 2, backward 1, gather 0, scatter 1, backward 0,
    scatter 0"""


@pytest.mark.parametrize(
    ("kind", "order"), [(ShardedBlock, WHEN_NEEDED), (PrefetchingBlock, ONE_AHEAD)]
)
def test_a_block_is_gathered_when_it_is_needed_or_one_ahead(ranks, kind, order):
    report = ranks(2, take_a_step, kind, trace=True)
    names = {}
    for layer, numbers in enumerate((4 * 5, 6 * 7, 8 * 9)):  # of float32; a rank has half
        names["all_gather_single", 4 * numbers] = f"gather {layer}"
        names["reduce_scatter_single", 2 * numbers] = f"scatter {layer}"
    mine = [e.note or names.get((e.op, e.nbytes)) for e in report.events if e.rank == 0]
    assert [name for name in mine if name] == re.split(r",\s+", order)


def accumulate_over_two(model, rank, world_size):
    """Two backwards add up, as in one process; then two of the next step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for factor in (1.0, 2.0):
            model(factor * inputs(rank, world_size)).square().mean().backward()
        optimizer.step()
    return model(inputs(0, 1)).detach()


def test_gradients_that_were_scattered_during_backward_add_up(ranks):
    def train_shards(rank, world_size):
        model = linked([PrefetchingBlock(layer) for layer in new_layers()])
        return accumulate_over_two(model, rank, world_size)

    expected = accumulate_over_two(nn.Sequential(*new_layers()), 0, 1)
    found = ranks(3, train_shards).results
    assert largest_difference(found, [expected] * 3) < 1e-14


def test_a_gradient_of_a_backward_that_failed_is_forgotten(ranks):
    """The last block has sent its gradient when the first one's backward raises an error."""

    def train_shards(rank, world_size):
        layers = new_layers()
        model = linked([PrefetchingBlock(layer) for layer in layers])
        output = model[0](inputs(rank, world_size).requires_grad_())

        def fail(gradient):
            raise RuntimeError("a broken hook")

        output.register_hook(fail)
        with pytest.raises(RuntimeError, match="a broken hook"):
            model[2](model[1](output)).square().mean().backward()
        return three_steps(model, rank, world_size)

    expected = three_steps(nn.Sequential(*new_layers()), 0, 1)
    found = ranks(2, train_shards).results
    assert largest_difference(found, [expected] * 2) < 1e-14


def test_a_scatter_runs_beside_the_next_block_and_ends_with_backward(ranks):
    def watch(rank, world_size):
        model, seen = linked([PrefetchingBlock(layer) for layer in new_layers()]), []

        def look(*_):
            seen.append([block.scattering is not None for block in model])

        for block in model:
            block.module.register_full_backward_pre_hook(look)
        model(inputs(rank, world_size).requires_grad_()).sum().backward()
        look()
        return seen, [block.shard.grad is not None for block in model]

    beside = [[False] * 3, [False, False, True], [False, True, False], [False] * 3]
    assert ranks(2, watch).results == [(beside, [True] * 3)] * 2


def with_decay(rank, world_size):
    """How many parameters have two dimensions, before a model is sharded and after it."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    before = sum(p.dim() > 1 for p in model.parameters())
    sharded = fully_sharded(model, [model[0], model[2]])
    return before, sum(p.dim() > 1 for p in sharded.parameters())


def test_the_usual_filter_for_weight_decay_finds_no_flat_shard(ranks):
    """So the notebook and docs/mine.md warn of it."""
    assert ranks(2, with_decay).results == [(2, 0)] * 2
