"""Sharded training is that of one process, gradient by gradient and step by step."""

from functools import partial
from inspect import signature

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


def spoil(module):
    """Only what rank 0 has may count, buffers too."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor += dist.get_rank()


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
    spoil(module)
    model = ShardedGradients(module, bucket_cap_mb)
    assert module.mark == 0
    optimizer = chosen(model.shards, **settings)
    for step in range(steps):
        loss_of(model, step).backward()
        complete = [bucket for bucket in model.slices if not bucket.missing]
        assert all(p.grad is None for bucket in complete for p in bucket.parameters)
        assert sum(bucket.sent is not None for bucket in complete) <= 1
        model.finish_gradient_synchronization()
        assert all(p.grad is None for p in module.parameters())
        optimizer.step()
        model.gather_parameters()
    return values(module)


def with_model(module, chosen, settings, steps, units="all", prefetch=True):
    chosen_units = {"all": None, "blocks": module.blocks, "root": [module], "none": []}
    spoil(module)
    model = ShardedModel(module, chosen_units[units], prefetch=prefetch)
    assert module.mark == 0
    optimizer = chosen(trained(model.parameters()), **settings)
    for step in range(steps):
        optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model, step)
        loss_of(model, step).backward()
        assert sum(flat.sum is not None for flat in model.flats) <= 1
        model.finish_gradient_synchronization()
        assert all(flat.full is None for flat in model.flats)
        assert all(p.grad.shape == p.shape for p in trained(model.parameters()))
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
@pytest.mark.parametrize(
    ("world_size", "optimizer", "kind"),
    [
        (1, "gradient", {"tied": False, "unused": True}),
        (3, "gradient", {"tied": False, "frozen": True, "unused": True}),
        (2, "adam", {"frozen": True, "unused": True}),
        (3, "adam", {"tied": False}),
    ],
)
def test_steps_are_those_of_one_process(ranks, world_size, optimizer, kind, wrapper):
    steps = 3 if optimizer == "adam" else 1
    expected = train_alone(optimizer, steps, **kind)
    for found in ranks(world_size, train, wrapper, optimizer, steps, **kind).results:
        assert list(found) == list(expected)
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


def test_other_suites_call_these_by_name():
    signature(ShardedOptimizer).bind([], torch.optim.AdamW, lr=0.1, betas=(0.9, 0.99))
    signature(ShardedModel).bind(nn.Linear(1, 1), compute_dtype=torch.bfloat16)
    assert {"finish_gradient_synchronization", "full_parameters"} <= set(dir(ShardedModel))
