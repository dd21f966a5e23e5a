"""An adversarial pair on several ranks: two networks, two optimizers, two averages.

A generator makes images from noise; a discriminator says whether an image is real. They
train in turns, each on its own loss (I. Goodfellow et al., 2014,
https://arxiv.org/abs/1406.2661). Each has its own optimizer, one loss scaler serves both,
and all ranks average the gradients of each network between its backward and its step.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import softplus

from mgpu_tutorial.distributed_sgd.sgd import average_gradients, flat_parameters
from mgpu_tutorial.lab import progress
from mgpu_tutorial.shared.data import digits

NOISE = 16


def new_generator() -> nn.Module:
    """Noise (N, 16) becomes 8 by 8 pixels from 0 to 1, enlarged to images (N, 784)."""
    layers = [nn.Linear(NOISE, 128), nn.LeakyReLU(0.2), nn.Linear(128, 64), nn.Sigmoid()]
    enlarge = [nn.Unflatten(1, (1, 8, 8)), nn.Upsample((28, 28), mode="bilinear")]
    return nn.Sequential(*layers, *enlarge, nn.Flatten())


def new_discriminator() -> nn.Module:
    """Images (N, 784) become a number each: positive for "real"."""
    return nn.Sequential(nn.Linear(784, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))


def discriminator_loss(real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Small where the discriminator says "real" of real images and "fake" of fakes."""
    return softplus(-to_float32(real)).mean() + softplus(to_float32(fake)).mean()


def generator_loss(fake: torch.Tensor) -> torch.Tensor:
    """Small where the discriminator takes fakes for real."""
    return softplus(-to_float32(fake)).mean()


def to_float32(x: torch.Tensor) -> torch.Tensor:
    """At least float32: a loss is a sum, and short numbers are bad at sums."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def real_images() -> torch.Tensor:
    """The training digits as (N, 784), with values between 0 and 1."""
    return (digits().images * 0.325 + 0.306).flatten(1).clamp(0, 1)


def draw_share(
    images: torch.Tensor, batch: int, step: int, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of the step's global batch of images, and of its global noise.

    All ranks draw the same global batch from the number of the step; nothing is sent.
    """
    random = torch.Generator().manual_seed(step)
    with torch.device("cpu"):  # the same numbers whatever the device
        chosen = torch.randint(len(images), (batch,), generator=random)
        noise = torch.randn(batch, NOISE, generator=random)
    mine = slice(rank * batch // world_size, (rank + 1) * batch // world_size)
    return images[chosen[mine].to(images.device)], noise[mine].to(images)


class TrainedPair(NamedTuple):
    """One rank after training.

    The parameters of both networks, the generator's first, in one vector; samples (12, 784)
    by the number of steps after which they were drawn; the loss scale; and how many steps
    each optimizer took.
    """

    parameters: torch.Tensor
    samples: dict[int, torch.Tensor]
    scale: float
    generator_steps: int
    discriminator_steps: int


def train_pair(
    rank: int,
    world_size: int,
    steps: int = 10,
    keep: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
    infinite: tuple[int, int] | None = None,
    **settings: float,
) -> TrainedPair:
    """All ranks train both networks in turns; one scaler with these `settings` serves both.

    `infinite` = (rank, step) spoils a loss of the discriminator; `keep`: draw samples then.
    """
    generator, discriminator, images = new_pair(dtype)
    for_generator, for_discriminator = new_adam(generator), new_adam(discriminator)
    device = images.device.type
    short = partial(torch.autocast, device, dtype, enabled=dtype.itemsize == 2)
    scaler = GradScaler(device, **{"init_scale": 1024.0} | settings)
    samples = {}
    for step in progress(range(steps)):
        real, noise = draw_share(images, 60, step, rank, world_size)
        # the discriminator learns to tell real images from made ones
        with short():
            made = generator(noise)
            loss = discriminator_loss(discriminator(real), discriminator(made.detach()))
        if infinite == (rank, step):
            loss = loss * float("inf")
        descend(discriminator, for_discriminator, scaler, loss)
        # the generator learns to make images that it takes for real
        with short():
            loss = generator_loss(discriminator(made))
        descend(generator, for_generator, scaler, loss)
        scaler.update()  # once, when both optimizers have had their step
        if step + 1 in keep:
            samples[step + 1] = draw_samples(generator)
    taken = steps_taken(for_generator), steps_taken(for_discriminator)
    both = flat_parameters(nn.ModuleList([generator, discriminator]))
    return TrainedPair(both, samples, scaler.get_scale(), *taken)


def descend(
    network: nn.Module, optimizer: torch.optim.Adam, scaler: GradScaler, loss: torch.Tensor
) -> None:
    """All ranks average the gradients of one network; then its optimizer steps, or skips."""
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    average_gradients(network)
    scaler.step(optimizer)  # unscales first


def new_pair(dtype: torch.dtype) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A generator, a discriminator, drawn in this order, and the images, all in float32.

    In float64 where that is asked for.
    """
    torch.manual_seed(0)
    images = real_images().to(torch.promote_types(dtype, torch.float32))
    return new_generator().to(images.dtype), new_discriminator().to(images.dtype), images


def draw_samples(generator: nn.Module) -> torch.Tensor:
    """What the generator makes of twelve noises, always the same: (12, 784)."""
    random = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        noise = torch.randn(12, NOISE, generator=random)
    return generator(noise.to(next(generator.parameters()))).detach().float()


def new_adam(net: nn.Module) -> torch.optim.Adam:
    """The optimizer of one of the two networks."""
    return torch.optim.Adam(net.parameters(), lr=5e-3, betas=(0.5, 0.99), eps=1e-4)


def steps_taken(optimizer: torch.optim.Adam) -> int:
    """How many steps Adam has taken: it counts them for each parameter."""
    return max((int(state["step"]) for state in optimizer.state.values()), default=0)
