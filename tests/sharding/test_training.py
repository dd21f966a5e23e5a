"""Sharded training is that of one process, gradient by gradient and step by step."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.sharding import figures, fsdp, training
from mgpu_tutorial.sharding.gradients import ShardedGradients
from mgpu_tutorial.sharding.model import ShardedModel
from mgpu_tutorial.sharding.optimizer import ShardedOptimizer
from tests.sharding.reference import (
    OPTIMIZERS,
    loss_of,
    new_model,
    train_alone,
    trained,
    values,
)


def with_optimizer(module, chosen, settings, steps, to_owner=True):
    optimizer = ShardedOptimizer(module.parameters(), chosen, **settings)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(module, step).backward()
        if to_owner:
            optimizer.average_gradients()
        else:
            training.average_gradients(module)
        optimizer.step()
    return values(module)


def with_gradients(module, chosen, settings, steps, bucket_cap_mb=1.0):
    model = ShardedGradients(module, bucket_cap_mb)
    optimizer = chosen(model.shards, **settings)
    for step in range(steps):
        loss_of(model, step).backward()
        assert all(p.grad is None for p in module.parameters())
        assert sum(bucket.sent is not None for bucket in model.slices) <= 1
        model.finish_gradient_synchronization()
        optimizer.step()
        model.gather_parameters()
    return values(module)


def with_model(module, chosen, settings, steps, units="all", prefetch=True):
    chosen_units = {"all": None, "blocks": module.blocks, "root": [module], "none": []}
    model = ShardedModel(module, chosen_units[units], prefetch=prefetch)
    optimizer = chosen(trained(model.parameters()), **settings)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        assert sum(flat.sum is not None for flat in model.flats) <= 1
        model.finish_gradient_synchronization()
        assert all(flat.full is None for flat in model.flats)
        optimizer.step()
    return model.full_parameters()


def with_fully_shard(module, chosen, settings, steps):
    fsdp.block_by_block(module)
    optimizer = chosen(trained(module.parameters()), **settings)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(module, step).backward()
        optimizer.step()
    return fsdp.whole_values(module)


WRAPPERS = [with_optimizer, with_gradients, with_model, with_fully_shard]
SETTINGS = [
    partial(with_optimizer, to_owner=False),
    partial(with_gradients, bucket_cap_mb=0),  # each parameter alone
    partial(with_gradients, bucket_cap_mb=0.001),
    partial(with_model, units="blocks"),
    partial(with_model, units="root"),
    partial(with_model, units="none"),
    partial(with_model, prefetch=False),
]


def name_of(wrapper):
    return f"{wrapper.func.__name__} {wrapper.keywords}" if hasattr(wrapper, "func") else None


def train(rank, world_size, wrapper, optimizer, steps, **kind):
    """The parameters after some steps on the ranks' shares of each batch."""
    return wrapper(new_model(**kind), *OPTIMIZERS[optimizer], steps)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients_are_those_of_one_process(ranks, world_size, wrapper):
    kind = {"tied": False, "frozen": True}
    expected = train_alone("gradient", steps=1, **kind)
    for found in ranks(world_size, train, wrapper, "gradient", 1, **kind).results:
        assert list(found) == list(expected)
        assert largest_difference(found, expected) < 1e-14


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", [{"tied": False}, {"frozen": True}], ids=str)
def test_three_steps_of_adam_are_those_of_one_process(ranks, kind, wrapper):
    expected = train_alone("adam", steps=3, **kind)
    for found in ranks(2, train, wrapper, "adam", 3, **kind).results:
        assert largest_difference(found, expected) < 1e-12


@pytest.mark.parametrize("wrapper", [*WRAPPERS, *SETTINGS], ids=name_of)
def test_two_ranks_in_float32_are_equal_to_the_bit(ranks, wrapper):
    expected = train_alone("sgd", steps=3, parts=2, dtype=torch.float32)
    for found in ranks(2, train, wrapper, "sgd", 3, dtype=torch.float32).results:
        assert largest_difference(found, expected) == 0


# The chapter's own loop


def adam_alone(steps):
    """The chapter's model after some steps of one process."""
    model = training.new_model(torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        training.loss_of(model, step, 0, 1).backward()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("prepare", fsdp.ALL_STAGES)
def test_a_stage_trains_as_one_process(ranks, prepare):
    expected = adam_alone(steps=2)
    report = ranks(3, training.train, prepare, steps=2, dtype=torch.float64)
    assert largest_difference(report.results, [expected] * 3) < 1e-12


def test_every_step_and_every_rank_has_sequences_of_its_own():
    model = training.new_model()
    with torch.no_grad():
        tokens = torch.randint(64, (12, 8), generator=torch.Generator().manual_seed(2))
        logits = model(tokens)[:, :-1].transpose(1, 2)  # of the tokens that come next
        expected = nn.functional.cross_entropy(logits, tokens[:, 1:]).item()
        whole = [training.loss_of(model, step, 0, 1).item() for step in range(3)]
        shares = [training.loss_of(model, 2, rank, 4).item() for rank in range(4)]
    assert len({*whole, *shares}) == 7
    assert sum(shares) / 4 == pytest.approx(whole[2]) == expected


@pytest.mark.parametrize(
    ("prepare", "times"),
    [
        (training.zero_0, {"all_reduce": 2}),
        (training.zero_1, {"broadcast": 1, "reduce": 1}),
        (training.zero_2, {"all_gather_single": 1, "reduce_scatter_single": 1}),
        (training.zero_3, {"all_gather_single": 2, "reduce_scatter_single": 1}),
    ],
)
def test_a_step_sends_the_model_two_or_three_times(ranks, prepare, times):
    report = ranks(2, figures.trace_step, prepare, trace=True)
    assert figures.models_sent(report) == times | {"in all": sum(times.values())}


# What nobody uses


def leave_one_out(rank, world_size, wrapper):
    """A step of SGD with a rate of 1 that does not use the second of three layers."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    before = values(layers)

    class OfTwo(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return layers[2](layers[0](x))

    model = wrapper(OfTwo())
    is_model = wrapper is ShardedModel
    optimizer = torch.optim.SGD(model.parameters() if is_model else model.shards, lr=1.0)
    model(torch.ones(1, 2) * (rank + 1)).sum().backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    if is_model:
        after = {n.removeprefix("layers."): p for n, p in model.full_parameters().items()}
    else:
        model.gather_parameters()
        after = values(layers)
    return {name: before[name] - after[name] for name in before}


@pytest.mark.parametrize("wrapper", [ShardedGradients, ShardedModel])
def test_the_gradient_of_an_unused_layer_is_zero(ranks, wrapper):
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    for rank in range(2):
        (layers[2](layers[0](torch.ones(1, 2) * (rank + 1))).sum() / 2).backward()
    expected = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in layers.named_parameters()
    }
    for found in ranks(2, leave_one_out, wrapper).results:
        assert largest_difference(found, expected) < 1e-6
        assert found["1.weight"].tolist() == [[0, 0], [0, 0]]


# All begin alike


def wrap_other_values(rank, world_size, wrapper):
    """Each rank draws values of its own; those that it has once the module is wrapped."""
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    module[1].running_mean += rank + 1
    model = wrapper(module)
    whole = model.full_parameters() if wrapper is ShardedModel else values(module)
    return whole, module[1].running_mean


@pytest.mark.parametrize("wrapper", [ShardedGradients, ShardedModel])
def test_all_ranks_begin_with_parameters_and_buffers_of_rank_0(ranks, wrapper):
    torch.manual_seed(0)
    first = values(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    for found, mean in ranks(3, wrap_other_values, wrapper).results:
        assert largest_difference(found, first) == 0
        assert mean.tolist() == [1, 1]


# What others build on


def train_from_outside(rank, world_size):
    """A sharded model and a sharded optimizer, called as other suites call them."""
    torch.manual_seed(rank)
    model = ShardedModel(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), compute_dtype=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    plain = nn.Linear(4, 3)
    for parameter in plain.parameters():
        dist.broadcast(parameter.detach(), 0)
    adamw = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    optimizer = ShardedOptimizer(plain.parameters(), torch.optim.AdamW, **adamw)
    plain(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model.full_parameters(), values(plain)


def test_the_interface_that_other_suites_know(ranks):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    plain = nn.Linear(4, 3)
    adamw = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.1)
    for model, optimizer in (
        (module, torch.optim.SGD(module.parameters(), lr=0.1)),
        (plain, adamw),
    ):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    for found in ranks(2, train_from_outside).results:
        assert largest_difference(found, (values(module), values(plain))) < 1e-6
