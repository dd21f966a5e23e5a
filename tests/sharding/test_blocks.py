"""ZeRO 3 by blocks: when a block is whole, and when it is on its way."""

import re
import time

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

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


class Layer(nn.Module):
    """It can compute again in backward, as the layers of Transformers do."""

    def __init__(self, reentrant):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.scale, self.reentrant = nn.Parameter(torch.ones(6)), reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.compute(x)
        return checkpoint(self.compute, x, use_reentrant=self.reentrant)

    def compute(self, x):
        return x + self.down(self.up(x).square()) * self.scale


class Checkpointed(nn.Module):
    """Three layers with a checkpoint in each, or around each, and a head of the root's."""

    def __init__(self, inside=None, around=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
        self.layers = nn.ModuleList(Layer(inside) for _ in range(3))
        self.around = around

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            around = self.around is not None
            x = checkpoint(layer, x, use_reentrant=self.around) if around else layer(x)
        return self.head(x)

    def answer(self, x):
        """A method that calls the whole model, as `generate` does."""
        return self(x)


def rows_of_six(rank, world_size):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    return x.double().chunk(world_size)[rank]


def two_steps(model, rank, world_size):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(rows_of_six(rank, world_size)).square().mean().backward()
        optimizer.step()
    return model(rows_of_six(0, 1)).detach()


def train_checkpointed(rank, world_size, kind, inside, around):
    """What two steps lead to, and how much of the first forward is alive before backward."""
    model = Checkpointed(inside, around).double()
    weights, activations = [], []

    def look(part, inputs, output):
        weights.append(StorageWeakRef(part.weight.untyped_storage()))
        activations.append(StorageWeakRef(output.untyped_storage()))

    for layer in model.layers:
        layer.up.register_forward_hook(look)
    root = fully_sharded(model, list(model.layers), kind=kind)
    loss = root(rows_of_six(rank, world_size)).square().mean()
    freed = are_freed(weights), are_freed(activations)
    loss.backward()
    root.zero_grad()
    return two_steps(root, rank, world_size), freed, are_freed([*weights, *activations])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize("kind", [ShardedBlock, PrefetchingBlock])
def test_a_checkpoint_frees_activations_and_is_right(ranks, kind, where, reentrant):
    inside, around = (reentrant, None) if where == "inside" else (None, reentrant)
    expected = two_steps(Checkpointed().double(), 0, 1)
    for found, freed, all_freed in ranks(2, train_checkpointed, kind, inside, around).results:
        assert (freed, all_freed) == ((True, True), True)
        assert largest_difference(found, expected) < 1e-14


def compute_outside(rank, world_size, kind):
    """Parts are called alone, before a step and after it, by a method and under no_grad."""
    model = Checkpointed().double()
    root = fully_sharded(model, list(model.layers), kind=kind) if kind else model
    found, x = [], rows_of_six(rank, world_size)
    optimizer = torch.optim.SGD(root.parameters(), lr=0.01)
    for _ in range(2):
        with torch.no_grad():
            found += [root.first(x), root.layers[0](x), root.answer(x)]
        root.answer(x).square().mean().backward()
        root(x).square().mean().backward()
        root.head(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*found, root(x).detach()]


@pytest.mark.parametrize("kind", [ShardedBlock, PrefetchingBlock])
def test_parts_of_a_sharded_model_can_be_called_alone(ranks, kind):
    (one,) = ranks(1, compute_outside, None).results
    (found,) = ranks(1, compute_outside, kind).results
    assert largest_difference(found, one) < 1e-14
    outputs = zip(*ranks(2, compute_outside, kind).results, strict=True)
    assert largest_difference([torch.cat(rows) for rows in outputs], one) < 1e-14


def step_all_but_the_root(rank, world_size):
    model = Checkpointed().double()
    root = fully_sharded(model, list(model.layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # its shard is in `root` only
    for _ in range(2):
        root(rows_of_six(rank, world_size)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_an_optimizer_without_what_the_root_keeps_is_refused(refused):
    says = "a step has changed the blocks inside, but not what the root keeps"
    refused(2, says, step_all_but_the_root, sent=True)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["the root", "its layers"])
def test_a_compiled_model_is_sharded_right(ranks, what):
    def train_compiled(rank, world_size):
        model = Checkpointed().double()
        if what == "its layers":
            for layer in model.layers:
                layer.compile(backend="aot_eager")
        root = fully_sharded(model, list(model.layers))
        if what == "the root":
            root = torch.compile(root, backend="aot_eager")
        return two_steps(root, rank, world_size)

    expected = two_steps(Checkpointed().double(), 0, 1)
    found = ranks(2, train_compiled).results
    assert largest_difference(found, [expected] * 2) < 1e-14
