"""The pair on N ranks takes the steps of one process, which are written out here."""

import functools

import pytest
import torch
from torch.nn.functional import softplus

from mgpu_tutorial.lab import RankFailed, launch
from mgpu_tutorial.mixed_precision import adversarial
from mgpu_tutorial.shared.data import digits
from tests.thorough import again
from tests.together import together

DOUBLE = {"steps": 4, "keep": (4,), "dtype": torch.float64}
DOUBLED = {"double": functools.partial(adversarial.train_pair, **DOUBLE)}
CASES = {  # by the number of ranks
    1: DOUBLED
    | {"grown": functools.partial(adversarial.train_pair, steps=4, growth_interval=4)},
    2: DOUBLED
    | {
        "float32": functools.partial(adversarial.train_pair, steps=4),
        "infinite on 0": functools.partial(adversarial.train_pair, steps=3, infinite=(0, 2)),
        "infinite on 1": functools.partial(adversarial.train_pair, steps=3, infinite=(1, 2)),
        "float16": functools.partial(adversarial.train_pair, steps=4, dtype=torch.float16),
        "bare": functools.partial(adversarial.train_wrapped_pair, unwrap=True),
        "wrapped": functools.partial(adversarial.train_wrapped_pair, unwrap=False),
        "retained": functools.partial(
            adversarial.train_wrapped_pair, detach=False, retain=True
        ),
    },
    3: DOUBLED,
}


@functools.cache
def trained(world_size):
    """What the ranks of each case return."""
    cases = CASES[world_size]
    return dict(zip(cases, together(world_size, *cases.values()), strict=True))


def near(x, y, atol):
    torch.testing.assert_close(x, y, rtol=0, atol=atol)


def batch_by_hand(step, images):
    """The global batch of a step: 60 images and 60 times 16 random numbers."""
    random = torch.Generator().manual_seed(step)
    chosen = torch.randint(len(images), (60,), generator=random)
    return images[chosen], torch.randn(60, 16, generator=random).to(images)


def pair_and_images(dtype):
    """Both networks as every rank makes them, and the digits between 0 and 1."""
    torch.manual_seed(0)
    networks = adversarial.new_generator(), adversarial.new_discriminator()
    images = (digits().images * 0.325 + 0.306).flatten(1).clamp(0, 1)
    return *(network.to(dtype) for network in networks), images.to(dtype)


def flat(*networks):
    return torch.cat([p.detach().flatten() for n in networks for p in n.parameters()])


@functools.cache
def trained_by_hand(dtype, steps):
    """One process, two plain Adams: the parameters of both networks, and 12 samples."""
    generator, discriminator, images = pair_and_images(dtype)
    fixed = torch.randn(12, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    adam = functools.partial(torch.optim.Adam, lr=5e-3, betas=(0.5, 0.99), eps=1e-4)
    for_generator, for_discriminator = (
        adam(network.parameters()) for network in (generator, discriminator)
    )
    for step in range(steps):
        real, noise = batch_by_hand(step, images)
        fake = generator(noise)
        says_real, says_fake = discriminator(real), discriminator(fake.detach())
        for_discriminator.zero_grad()
        (softplus(-says_real).mean() + softplus(says_fake).mean()).backward()
        for_discriminator.step()
        for_generator.zero_grad()
        softplus(-discriminator(fake)).mean().backward()
        for_generator.step()
    return flat(generator, discriminator), generator(fixed).detach().float()


@pytest.mark.parametrize("world_size", [1, 2, again(3)])
def test_the_pair_on_n_ranks_is_the_pair_written_out(world_size):
    expected, samples = trained_by_hand(torch.float64, 4)
    results = trained(world_size)["double"]
    for result in results:
        near(result.parameters, expected, 1e-13)
        near(result.samples[4], samples, 1e-6)
        assert torch.equal(result.parameters, results[0].parameters)
        assert (result.generator_steps, result.discriminator_steps) == (4, 4)


def test_the_pair_in_float32_is_the_pair_written_out():
    for result in trained(2)["float32"]:
        near(result.parameters, trained_by_hand(torch.float32, 4)[0], 1e-5)


def test_every_step_draws_another_batch_and_every_rank_its_rows():
    images = torch.arange(1000.0)[:, None]
    for step in (0, 1, 7):
        real, noise = batch_by_hand(step, images)
        shares = [adversarial.draw_share(images, 60, step, rank, 3) for rank in range(3)]
        assert torch.equal(torch.cat([images for images, _ in shares]), real)
        assert torch.equal(torch.cat([noise for _, noise in shares]), noise)
        assert all(len(images) == 20 for images, _ in shares)


@pytest.mark.parametrize("who", [0, 1])
def test_one_infinity_makes_all_ranks_skip_the_step_of_that_network_only(who):
    """The last step is the one: the generator's goes through the discriminator as it was."""
    results = trained(2)[f"infinite on {who}"]
    expected = pair_that_skips_by_hand()
    for result in results:
        near(result.parameters, expected, 1e-5)
        assert (result.generator_steps, result.discriminator_steps) == (3, 2)
        assert result.scale == 512
        assert torch.equal(result.parameters, results[0].parameters)


@functools.cache
def pair_that_skips_by_hand():
    """Three steps in one process, and in the third the discriminator stays as it is."""
    generator, discriminator, images = pair_and_images(torch.float32)
    adam = functools.partial(torch.optim.Adam, lr=5e-3, betas=(0.5, 0.99), eps=1e-4)
    for_generator = adam(generator.parameters())
    for_discriminator = adam(discriminator.parameters())
    for step in range(3):
        real, noise = batch_by_hand(step, images)
        made = generator(noise)
        if step < 2:
            for_discriminator.zero_grad()
            loss = softplus(-discriminator(real)).mean()
            (loss + softplus(discriminator(made.detach())).mean()).backward()
            for_discriminator.step()
        for_generator.zero_grad()
        softplus(-discriminator(made)).mean().backward()
        for_generator.step()
    return flat(generator, discriminator)


def test_the_scale_grows_once_per_iteration_and_not_once_per_network():
    (pair,) = trained(1)["grown"]
    assert pair.scale == 2048  # twice as many updates would make it 4096


def test_the_pair_trains_under_autocast_with_one_scaler():
    one, two = trained(2)["float16"]
    assert torch.equal(one.parameters, two.parameters) and one.parameters.isfinite().all()
    assert one.generator_steps == one.discriminator_steps == 4


def test_real_images_lie_between_0_and_1():
    images = adversarial.real_images()
    assert images.shape[1] == 784 and images.min() >= 0 and 0.9 < images.max() <= 1


def wrapped_by_hand(steps=2):
    """The pair with SGD in one process: what two DDP modules must come to."""
    generator, discriminator, images = pair_and_images(torch.float32)
    for step in range(steps):
        real, noise = batch_by_hand(step, images)
        fake = generator(noise)
        answers = discriminator(real), discriminator(fake.detach())
        loss = softplus(-answers[0]).mean() + softplus(answers[1]).mean()
        descend(loss, discriminator)
        descend(softplus(-discriminator(fake)).mean(), generator)
    return flat(generator, discriminator)


def descend(loss, network, lr=0.1):
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            parameter -= lr * gradient


def test_two_wrapped_modules_take_the_steps_of_one_process():
    expected = wrapped_by_hand()
    bare, wrapped = (trained(2)[name] for name in ("bare", "wrapped"))
    for result in bare + wrapped:
        near(torch.cat([result.generator, result.discriminator]), expected, 1e-6)
    assert torch.equal(bare[0].generator, bare[1].generator)
    assert torch.equal(bare[0].discriminator, bare[1].discriminator)
    generator = 16 * 128 + 128 + 128 * 64 + 64
    discriminator = 784 * 128 + 128 + 128 + 1
    assert bare[0].sent == {"generator": 2 * generator, "discriminator": 2 * discriminator}
    assert wrapped[0].sent["discriminator"] == 2 * bare[0].sent["discriminator"]
    assert wrapped[0].sent["generator"] == bare[0].sent["generator"]


def test_without_detach_backward_finds_no_graph_or_the_generators_part():
    with pytest.raises(RankFailed, match="backward through the graph a second time"):
        launch(adversarial.train_wrapped_pair, 2, detach=False)
    first, second = trained(2)["retained"]
    assert not torch.equal(first.generator, second.generator)
    assert torch.equal(first.discriminator, second.discriminator)
