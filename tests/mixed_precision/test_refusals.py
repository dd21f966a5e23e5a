"""Unequal shares are refused; an infinity anywhere is heard of everywhere."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.amp import GradScaler

from mgpu_tutorial.distributed_sgd.sgd import new_model
from mgpu_tutorial.mixed_precision import precision
from mgpu_tutorial.shared.data import digits


def train(rank, world_size, given):
    return precision.train_scaled(rank, world_size, precision.finish_step, **given)


def train_alone(rank, world_size, steps):
    model, optimizer = new_model()
    scaler = GradScaler("cpu", init_scale=1024.0)
    return precision.train_in_float16(model, optimizer, scaler, digits(), steps)


REFUSED = [
    (5, "24 images", train, ({},)),  # four of them would have more
    (1, "1438 images", train_alone, (range(48, 49),)),
]


@pytest.mark.parametrize("world_size, words, worker, given", REFUSED)
def test_refused(refused, world_size, words, worker, given):
    refused(world_size, ValueError(words), worker, *given)


def asked(rank, world_size, gradients):
    return precision.is_finite_everywhere(gradients[rank])


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


@given(st.lists(st.integers(0, 47), max_size=2))
def test_steps_within_the_images_are_taken_twice_over(steps):
    log = train_alone(0, 1, steps)
    assert log == [(1024.0, True)] * len(steps)


def test_a_scaler_that_is_switched_off_takes_every_step():
    model, optimizer = new_model()
    scaler = GradScaler("cpu", enabled=False)
    log = precision.train_in_float16(model, optimizer, scaler, digits(), range(2))
    assert log == [(1.0, True)] * 2


def test_an_answer_is_one_number(ranks):
    report = ranks(2, asked, [[ONE], [INF]], trace=True)
    assert [event.op for event in report.events if event.rank == 0] == ["all_reduce"]
