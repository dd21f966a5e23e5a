"""The pair on N ranks takes the steps of one process, which are written out here."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import softplus

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.mixed_precision import adversarial
from mgpu_tutorial.shared.data import digits


def batch_by_hand(step, images, batch=60):
    """The global batch of a step: images, and 16 random numbers for each."""
    random = torch.Generator().manual_seed(step)
    chosen = torch.randint(len(images), (batch,), generator=random)
    return images[chosen], torch.randn(batch, 16, generator=random).to(images)


@functools.cache
def trained_by_hand(dtype, steps, skipped=None):
    """One process, two plain Adams: the parameters of both networks, and 12 samples.

    In the step `skipped` the discriminator stays as it is.
    """
    torch.manual_seed(0)
    networks = adversarial.new_generator(), adversarial.new_discriminator()
    generator, discriminator = (network.to(dtype) for network in networks)
    images = (digits().images * 0.325 + 0.306).flatten(1).clamp(0, 1).to(dtype)
    fixed = torch.randn(12, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    for_generator, for_discriminator = (
        torch.optim.Adam(network.parameters(), lr=5e-3, betas=(0.5, 0.99), eps=1e-4)
        for network in (generator, discriminator)
    )
    for step in range(steps):
        real, noise = batch_by_hand(step, images)
        fake = generator(noise)
        for_discriminator.zero_grad()
        says_real, says_fake = discriminator(real), discriminator(fake.detach())
        (softplus(-says_real).mean() + softplus(says_fake).mean()).backward()
        if step != skipped:
            for_discriminator.step()
        for_generator.zero_grad()
        softplus(-discriminator(fake)).mean().backward()
        for_generator.step()
    both = [p.detach().flatten() for n in (generator, discriminator) for p in n.parameters()]
    return torch.cat(both), generator(fixed).detach().float()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_pair_on_n_ranks_is_the_pair_written_out(ranks, world_size):
    how = {"steps": 4, "keep": (2, 4), "dtype": torch.float64}
    results = ranks(world_size, adversarial.train_pair, **how).results
    expected, samples = trained_by_hand(torch.float64, 4)
    for result in results:
        assert largest_difference(result.parameters, expected) < 1e-13
        assert list(result.samples) == [2, 4]
        assert largest_difference(result.samples[4], samples) < 1e-6
        assert torch.equal(result.parameters, results[0].parameters)
        assert (result.generator_steps, result.discriminator_steps) == (4, 4)
    samples = trained_by_hand(torch.float64, 2)[1]
    assert largest_difference(results[0].samples[2], samples) < 1e-6


@pytest.mark.parametrize("who", [None, 0, 1])
def test_one_infinity_makes_all_ranks_skip_the_step_of_that_network_only(ranks, who):
    """The last step is the one: the generator's goes through the discriminator as it was."""
    infinite = None if who is None else (who, 2)
    results = ranks(2, adversarial.train_pair, steps=3, infinite=infinite).results
    expected, _ = trained_by_hand(torch.float32, 3, skipped=2 if infinite else None)
    for result in results:
        assert largest_difference(result.parameters, expected) < 1e-5
        assert result.generator_steps == 3
        assert result.discriminator_steps == (2 if infinite else 3)
        assert result.scale == (512 if infinite else 1024)
        assert torch.equal(result.parameters, results[0].parameters)


@pytest.mark.parametrize(("interval", "scale"), [(4, 2048), (5, 1024)])
def test_the_scale_grows_once_per_iteration_and_not_once_per_network(ranks, interval, scale):
    how = {"steps": 4, "growth_interval": interval}
    assert ranks(1, adversarial.train_pair, **how).results[0].scale == scale


def dtypes_of_outputs(rank, world_size):
    """What the layers of both networks return while a pair trains in float16."""
    dtypes = set()

    def note(module, inputs, output):
        if isinstance(module, torch.nn.Linear):
            dtypes.add(output.dtype)

    torch.nn.modules.module.register_module_forward_hook(note)
    pair = adversarial.train_pair(rank, world_size, steps=4, dtype=torch.float16)
    return pair, dtypes


def test_the_pair_trains_under_autocast_with_one_scaler(ranks):
    (one, dtypes), (two, _) = ranks(2, dtypes_of_outputs).results
    assert dtypes == {torch.float16} and one.parameters.dtype == torch.float32
    assert torch.equal(one.parameters, two.parameters) and one.parameters.isfinite().all()
    assert one.generator_steps == one.discriminator_steps == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_losses_are_computed_in_float32(dtype):
    real, fake = torch.randn(2, 50).to(dtype)
    wide_real, wide_fake = real.float(), fake.float()
    expected = softplus(-wide_real).mean() + softplus(wide_fake).mean()
    assert torch.equal(adversarial.discriminator_loss(real, fake), expected)
    assert torch.equal(adversarial.generator_loss(fake), softplus(-wide_fake).mean())


@given(st.integers(1, 70), st.integers(0, 1000), st.integers(1, 8))
def test_every_step_draws_another_batch_and_every_rank_its_rows(batch, step, world_size):
    images = torch.arange(1000.0)[:, None]
    shares = [
        adversarial.draw_share(images, batch, step, rank, world_size)
        for rank in range(world_size)
    ]
    real, noise = batch_by_hand(step, images, batch)
    assert torch.equal(torch.cat([images for images, _ in shares]), real)
    assert torch.equal(torch.cat([noise for _, noise in shares]), noise)
    sizes = [len(images) for images, _ in shares]
    assert max(sizes) - min(sizes) <= 1
