"""A model of Llama's kind with experts trains as one process does, and has a price."""

from functools import partial

import pytest
from torch.optim import SGD

from mgpu_tutorial.experts.mixture import ExpertsDDP, Mixture, OneExpert, evenly
from mgpu_tutorial.experts.parallel import combine, dispatch
from mgpu_tutorial.instruments.price.pricing import price
from mgpu_tutorial.shared import small_and_large as sizes


def small():
    return sizes.small().double()  # so that no choice hangs on rounding


def small_with_experts():
    return with_experts(small())


def as_it_is(model):
    return model


def with_experts(model, experts=4, dispatch=dispatch, kind=Mixture):
    return ExpertsDDP(model, experts, dispatch, combine, kind)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, id="once")])
def test_the_second_loss_is_that_of_one_process(ranks, world_size):
    """It is the first behind a step, so it has all gradients in it."""
    job = sizes.train, as_it_is, small_with_experts, sizes.SMALL, SGD
    (one,) = ranks(1, *job).results
    losses = ranks(world_size, *job).results
    mean = sum(losses) / world_size
    assert mean.item() == pytest.approx(one.item(), rel=0, abs=1e-12)


def test_a_price_counts_the_trips_of_the_tokens_and_the_dense_gradients():
    experts = partial(with_experts, experts=8, dispatch=evenly, kind=OneExpert)
    priced = price(sizes.train, 8, experts, partial(sizes.large, 1), sizes.LARGE)
    trips = 4 * 2 * (8192 * 2) * 4096  # there and back, twice; bytes of two choices each
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    dense = attention + 2 * 128_256 * 4096 + 3 * 4096 + 8 * 4096
    assert priced.sent() == (trips + 2 * 2 * dense) * 7 / 8
