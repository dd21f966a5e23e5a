"""Sharded training is that of one process, gradient by gradient and step by step."""

from functools import partial
from inspect import signature

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.sharding import fsdp, training
from mgpu_tutorial.sharding.gradients import ShardedGradients
from mgpu_tutorial.sharding.model import ShardedModel
from mgpu_tutorial.sharding.optimizer import ShardedOptimizer
from tests.sharding.reference import new_model, train_alone, values

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)  # a step shows the gradient's size


def zero_1(module, to_owner=True):
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    to_all = partial(training.average_gradients, module)
    average = optimizer.average_gradients if to_owner else to_all
    return training.Prepared(module, optimizer, lambda: values(module), average)


def zero_2(module, bucket_cap_mb=1.0):
    spoil(module)
    model = ShardedGradients(module, bucket_cap_mb)
    assert module.mark == 0

    def after_backward():
        complete = [part for part in model.slices if not part.missing]
        assert sum(part.sent is not None for part in complete) <= 1  # one is on its way
        model.finish_gradient_synchronization()
        assert all(p.grad is None for p in module.parameters())

    optimizer, whole = SGD(model.shards), partial(values, module)
    return training.Prepared(model, optimizer, whole, after_backward, model.gather_parameters)


def zero_3(module, units="all", prefetch=True):
    chosen = {"all": None, "blocks": module.blocks, "root": [module], "none": []}
    spoil(module)
    model = ShardedModel(module, chosen[units], prefetch=prefetch)
    assert module.mark == 0

    def after_backward():
        assert sum(flat.sum is not None for flat in model.flats) <= 1
        model.finish_gradient_synchronization()
        assert all(flat.full is None for flat in model.flats)

    optimizer = SGD(p for p in model.parameters() if p.requires_grad)
    return training.Prepared(model, optimizer, model.full_parameters, after_backward)


def spoil(module):
    """Only what rank 0 has may count, buffers too."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor += dist.get_rank()


STAGES = [zero_1, zero_2, zero_3]
SETTINGS = [
    partial(zero_1, to_owner=False),
    partial(zero_2, bucket_cap_mb=0),  # each parameter alone
    partial(zero_2, bucket_cap_mb=0.001),
    *(partial(zero_3, units=units) for units in ("blocks", "root", "none")),
    partial(zero_3, prefetch=False),
]


def train(rank, world_size, prepare, **kind):
    """The parameters after three steps on the ranks' shares of each batch."""
    prepared = prepare(new_model(**kind))
    for step in range(3):
        training.take_step(prepared, step)
    return prepared.whole()


@pytest.mark.parametrize("prepare", STAGES)
@pytest.mark.parametrize(
    ("world_size", "kind"),
    [
        (1, {"tied": False, "unused": True}),
        (2, {"frozen": True, "unused": True}),
        (3, {"tied": False, "frozen": True, "unused": True}),
    ],
)
def test_steps_are_those_of_one_process(ranks, world_size, kind, prepare):
    alone = new_model(**kind)
    expected = train_alone(alone, SGD(alone.parameters()), steps=3)
    report = ranks(world_size, train, prepare, **kind)
    assert largest_difference(report.results, [expected] * world_size) < 1e-12
    assert list(report.results[0]) == list(expected)


@pytest.mark.parametrize("prepare", STAGES + SETTINGS)
def test_two_ranks_in_float32_are_equal_to_the_bit(ranks, prepare):
    alone = new_model(torch.float32)
    expected = train_alone(alone, SGD(alone.parameters()), steps=3, parts=2)
    report = ranks(2, train, prepare, dtype=torch.float32)
    assert largest_difference(report.results, [expected] * 2) == 0


@pytest.mark.parametrize("prepare", fsdp.ALL_STAGES)
def test_the_chapters_loop_trains_as_one_process(ranks, prepare):
    alone = training.new_model(torch.float64)
    expected = train_alone(alone, torch.optim.Adam(alone.parameters(), lr=0.01), steps=2)
    report = ranks(3, training.train, prepare, steps=2, dtype=torch.float64)
    assert largest_difference(report.results, [expected] * 3) < 1e-12


def test_other_ranks_go_on_from_a_checkpoint_of_fully_shard(ranks, tmp_path):
    saved = ranks(2, fsdp.save, str(tmp_path)).results
    five = ranks(1, training.train, training.zero_0, 5).results
    assert largest_difference(saved, five * 2) < 1e-4
    trained = ranks(3, fsdp.load, str(tmp_path), steps=1).results
    six = ranks(1, training.train, training.zero_0, 6).results
    assert largest_difference(trained, six * 3) < 1e-4
    assert largest_difference(trained[0], five[0]) > 1e-3


def test_every_step_and_every_rank_has_sequences_of_its_own():
    model = training.new_model()
    tokens = torch.randint(64, (12, 8), generator=torch.Generator().manual_seed(2))
    logits = model(tokens)[:, :-1].transpose(1, 2)  # of the tokens that come next
    expected = nn.functional.cross_entropy(logits, tokens[:, 1:]).item()
    whole = [training.loss_of(model, step, 0, 1).item() for step in range(3)]
    shares = [training.loss_of(model, 2, rank, 4).item() for rank in range(4)]
    assert len({*whole, *shares}) == 7
    assert sum(shares) / 4 == pytest.approx(whole[2]) == expected


def test_other_suites_call_these_by_name():
    signature(ShardedOptimizer).bind([], torch.optim.AdamW, lr=0.1, betas=(0.9, 0.99))
    signature(ShardedModel).bind(nn.Linear(1, 1), compute_dtype=torch.bfloat16)
    assert {"finish_gradient_synchronization", "full_parameters"} <= set(dir(ShardedModel))
