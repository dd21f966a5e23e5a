"""The pair on N ranks takes the steps of one process, which are written out here."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.mixed_precision.adversarial import train_pair


def new_pair():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 12))
    discriminator = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1))
    return generator, discriminator, torch.randn(100, 12)


@functools.cache
def trained_by_hand(skipped=None):
    """One process, two plain Adams; in the step `skipped` the discriminator stays."""
    generator, discriminator, images = new_pair()
    both = generator, discriminator
    for_generator, for_discriminator = (torch.optim.Adam(n.parameters(), 5e-3) for n in both)
    for step in range(10):
        random = torch.Generator().manual_seed(step)
        real = images[torch.randint(100, (60,), generator=random)]
        fake = generator(torch.randn(60, 16, generator=random))
        for_discriminator.zero_grad()
        says_real, says_fake = discriminator(real), discriminator(fake.detach())
        (softplus(-says_real).mean() + softplus(says_fake).mean()).backward()
        if step != skipped:
            for_discriminator.step()
        for_generator.zero_grad()
        softplus(-discriminator(fake)).mean().backward()
        for_generator.step()
    return torch.cat([p.detach().flatten() for net in both for p in net.parameters()])


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("spoiled", [None, 0, 1])
def test_n_ranks_are_one_process_and_skip_the_step_of_one_network(ranks, world_size, spoiled):
    infinite = None if spoiled is None else (min(spoiled, world_size - 1), 9)
    results = ranks(world_size, train_pair, *new_pair(), infinite=infinite).results
    expected = trained_by_hand(9 if infinite else None)
    for parameters, scale, steps in results:
        assert largest_difference(parameters, expected) < 2e-5
        assert torch.equal(parameters, results[0][0])
        assert steps == [10, 9 if infinite else 10]
        assert scale == (512 if infinite else 1024)


@pytest.mark.parametrize(("interval", "scale"), [(10, 2048), (11, 1024)])
def test_the_scale_grows_once_per_iteration_and_not_once_per_network(ranks, interval, scale):
    report = ranks(1, train_pair, *new_pair(), growth_interval=interval)
    assert report.results[0][1] == scale


def dtypes_of_outputs(rank, world_size, *pair):
    """What the layers of both networks return while a pair trains in float16."""
    dtypes = set()

    def look(module, inputs, output):
        if isinstance(module, nn.Linear):
            dtypes.add(output.dtype)

    nn.modules.module.register_module_forward_hook(look)
    return train_pair(rank, world_size, *pair, dtype=torch.float16), dtypes


def test_the_pair_trains_under_autocast_with_one_scaler(ranks):
    ((one, _, steps), dtypes), ((two, _, _), _) = ranks(
        2, dtypes_of_outputs, *new_pair()
    ).results
    assert dtypes == {torch.float16} and one.dtype == torch.float32
    assert torch.equal(one, two) and one.isfinite().all()
    assert steps == [10, 10]
