"""The pair on N ranks takes the steps of one process, which are written out here."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.mixed_precision import adversarial


def new_pair():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 12))
    discriminator = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1))
    return (generator, discriminator), torch.randn(100, 12)


@cache
def trained_by_hand(skipped=None):
    """One process, two plain Adams; in the step `skipped` the discriminator stays."""
    pair, images = new_pair()
    generator, discriminator = pair
    for_generator, for_discriminator = (torch.optim.Adam(n.parameters(), 5e-3) for n in pair)
    for step in range(10):
        random = torch.Generator().manual_seed(step)
        real = images[torch.randint(100, (60,), generator=random)]
        noise = torch.randn(60, 16, generator=random)
        for_discriminator.zero_grad()
        says_real, says_fake = discriminator(real), discriminator(generator(noise).detach())
        (softplus(-says_real).mean() + softplus(says_fake).mean()).backward()
        if step != skipped:
            for_discriminator.step()
        for_generator.zero_grad()
        softplus(-discriminator(generator(noise))).mean().backward()
        for_generator.step()
    return [p.detach() for net in pair for p in net.parameters()]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("spoiled", [None, 0, 1])
def test_n_ranks_are_one_process_and_skip_the_step_of_one_network(ranks, world_size, spoiled):
    infinite = None if spoiled is None else (min(spoiled, world_size - 1), 9)
    given = adversarial.take_turns, *new_pair()
    results = ranks(world_size, adversarial.train_pair, *given, infinite=infinite).results
    expected = dict(enumerate(trained_by_hand(9 if infinite else None)))
    for parameters, scale, steps in results:
        assert largest_difference(dict(enumerate(parameters)), expected) < 2e-5
        assert steps == [10, 9 if infinite else 10]
        assert scale == (512 if infinite else 1024)


def test_the_pair_trains_in_float16_and_ranks_stay_alike(ranks):
    given = adversarial.take_turns, *new_pair()
    one, two = ranks(2, adversarial.train_pair, *given, dtype=torch.float16).results
    for mine, other in zip(one[0], two[0], strict=True):
        assert torch.equal(mine, other) and mine.dtype == torch.float32
    exact = dict(enumerate(trained_by_hand()))
    assert 0 < largest_difference(dict(enumerate(one[0])), exact) < 0.05
