"""What the chapter's functions cannot do they say, before anything is sent."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.amp import GradScaler

from mgpu_tutorial.distributed_sgd.sgd import new_model
from mgpu_tutorial.mixed_precision import precision
from mgpu_tutorial.sharding.stages import ShardedModel
from mgpu_tutorial.shared.data import digits


def train(rank, world_size, given):
    return precision.train_scaled(rank, world_size, precision.finish_step, **given)


def train_ddp(rank, world_size):
    return train(rank, world_size, {"ddp": True})


def train_alone(rank, world_size, steps):
    model, optimizer = new_model()
    scaler = GradScaler("cpu", init_scale=1024.0)
    return precision.train_in_float16(model, optimizer, scaler, digits(), steps)


REFUSED = [
    (5, "cannot be dealt evenly to 5 ranks", train, ({},)),  # four of them would have more
    (5, "cannot be dealt evenly to 5 ranks", train_ddp, ()),
    (25, "cannot be dealt evenly to 25 ranks", train, ({},)),  # one of them would have none
    (2, "infinite=(2, 1): 2 ranks take", train, ({"infinite": (2, 1)},)),
    (2, "infinite=(-1, 1)", train, ({"infinite": (-1, 1)},)),
    (2, "infinite=(1, 4): 2 ranks take steps 0 to 3", train, ({"infinite": (1, 4)},)),
    (2, "not for torch.float64", train, ({"dtype": torch.float64},)),
    (2, "not for torch.int16", train, ({"dtype": torch.int16},)),
    (2, "a loss times 0 ", train, ({"init_scale": 0},)),
    (2, "a loss times -8.0 ", train, ({"init_scale": -8.0},)),
    (2, "a loss times inf ", train, ({"init_scale": math.inf},)),
    (1, "1438 images are no range(48, 49)", train_alone, (range(48, 49),)),
    (1, "1438 images are no range(-1, 3)", train_alone, (range(-1, 3),)),
    (1, "take two ranks or more", precision.cast_to_float8, (True,)),
]


@pytest.mark.parametrize("world_size, words, worker, given", REFUSED)
def test_refused(refused, world_size, words, worker, given):
    refused(world_size, words, worker, *given)


def asked(rank, world_size, gradients):
    return precision.is_finite_everywhere(gradients[rank])


def asked_outside(rank, world_size):
    other = [dist.new_group([r]) for r in range(2)][1 - rank]
    return precision.is_finite_everywhere([torch.ones(2)], other)


def test_a_rank_that_is_not_in_the_group_is_told(refused):
    refused(2, "this rank is not in the group", asked_outside, sent=True)


def asked_for_parameters(rank, world_size, listed):
    parameters = new_model()[0].parameters()
    return precision.is_finite_everywhere(list(parameters) if listed else parameters)


@pytest.mark.parametrize("listed", [False, True])
def test_parameters_in_place_of_gradients_are_refused(refused, listed):
    """They are finite, whatever their gradients are."""
    refused(2, "these are parameters: give their gradients", asked_for_parameters, listed)


def test_a_norm_in_place_of_gradients_is_refused(refused):
    refused(2, "this is one number: give the gradients", asked, [torch.tensor(1.0)] * 2)


ONE, INF = torch.ones(2), torch.tensor([[1.0, math.inf]])


@pytest.mark.parametrize(
    "gradients, expected",
    [
        ([[ONE, None], [None, None], []], True),  # frozen, unused, none to spare
        ([[ONE, None], [None, INF], []], False),
        ([[ONE.half()], [INF.half()]], False),
        ([[ONE.bfloat16()], [ONE.bfloat16()]], True),
        ([[INF.repeat(3, 1).mT], [ONE]], False),  # not contiguous
        ([[ONE.long()], [ONE]], True),
        ([ONE, INF], False),  # a tensor in place of a list: its rows
        ([[torch.empty(0)], [ONE]], True),
        ([[INF]], False),  # one rank
    ],
)
def test_all_ranks_hear_of_an_infinity(ranks, gradients, expected):
    found = ranks(len(gradients), asked, gradients).results
    assert found == [expected] * len(gradients)


@settings(max_examples=5)  # each trains
@example([0, 47])
@given(st.lists(st.integers(0, 47), max_size=2))
def test_steps_within_the_images_are_taken_twice_over(steps):
    log = train_alone(0, 1, steps)
    assert log == [(1024.0, True)] * len(steps)


def test_a_scaler_that_is_switched_off_takes_every_step():
    model, optimizer = new_model()
    scaler = GradScaler("cpu", enabled=False)
    log = precision.train_in_float16(model, optimizer, scaler, digits(), range(2))
    assert log == [(1.0, True)] * 2


def finish_a_part(rank, world_size, name):
    model, _ = new_model()
    optimizer = torch.optim.SGD(model.fc2.parameters(), lr=0.1)
    if name == "conv1.weight":  # all is in the optimizer, and one is frozen
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.conv1.weight.requires_grad_(False)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(digits().images[:2]).sum()).backward()
    precision.finish_step(model, optimizer, scaler)


def finish_with(rank, world_size, what):
    model, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    parameters = [*model.parameters(), *(head.parameters() if what == "more" else [])]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = GradScaler("cpu", init_scale=1024.0 * (1 + rank * (what == "scales")))
    scaler.scale(head(model(torch.ones(1, 2))).sum()).backward()
    precision.finish_step(model, optimizer, scaler)


def test_ranks_with_other_scales_are_refused(refused):
    words = "the first scale of the loss: 1024.0 on rank 0 and 2048.0 on rank 1"
    refused(2, words, finish_with, "scales", sent=True)


def test_an_optimizer_with_more_than_the_model_is_refused(refused):
    words = "2 parameters with gradients outside of model, which nobody would average"
    refused(2, words, finish_with, "more")


def finish_in_float16(rank, world_size):
    model = torch.nn.Linear(2, 1).half()
    optimizer, scaler = torch.optim.SGD(model.parameters()), GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2).half()).float().sum()).backward()
    precision.finish_step(model, optimizer, scaler)


def test_parameters_in_float16_are_refused_before_the_average(refused):
    refused(2, "is in float16, which is too coarse to step in", finish_in_float16)


@pytest.mark.parametrize("words", ["no place in the optimizer", "no gradient"])
def test_what_would_stay_scaled_is_not_clipped_with_the_rest(refused, words):
    name = "conv1.weight" if words == "no gradient" else ""
    refused(2, words, finish_a_part, name)


def step_with_shards(rank, world_size):
    model = ShardedModel(new_model()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(sum(p.sum() for p in model.parameters())).backward()
    precision.finish_step(model, optimizer, scaler)


def test_shards_are_not_averaged_as_replicas(refused):
    refused(2, "is this rank's part of a larger one", step_with_shards, sent=True)
