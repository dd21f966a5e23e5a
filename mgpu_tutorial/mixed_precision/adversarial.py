"""An adversarial pair on several ranks: two networks, two optimizers, two averages.

A generator makes images from noise; a discriminator says whether an image is real. They
train in turns, each on its own loss (I. Goodfellow et al., 2014,
https://arxiv.org/abs/1406.2661). Each has its own optimizer and its own loss scaler, and
all ranks average the gradients of each between its backward and its step.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.distributed_sgd import average_flat, flat_parameters
from mgpu_tutorial.lab import progress
from mgpu_tutorial.mixed_precision.precision import autocast, new_scaler
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


class Player:
    """One of the two networks, with its own optimizer and its own scaler."""

    def __init__(self, net: nn.Module, lr: float, scale: float) -> None:
        self.net = net
        self.optimizer = torch.optim.Adam(net.parameters(), lr, betas=(0.5, 0.99), eps=1e-4)
        self.scaler = new_scaler(net, init_scale=scale, enabled=scale != 1.0)

    def learn(self, loss: torch.Tensor, synchronise: Callable[[nn.Module], None]) -> None:
        """All ranks take the same step down this player's loss; the other's stays."""
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        synchronise(self.net)
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()


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


def train_pair(
    rank: int,
    world_size: int,
    steps: int = 10,
    keep: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    double: bool = False,
    lr: float = 5e-3,
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """All ranks average the gradients of each player; returns parameters, kept samples."""
    torch.manual_seed(0)
    images = real_images().to(torch.float64 if double else torch.float32)
    generator = Player(new_generator().to(images.dtype), lr, scale)
    discriminator = Player(new_discriminator().to(images.dtype), lr, scale)
    fixed, samples = torch.randn(12, NOISE).to(images), {}
    for step in progress(range(steps)):
        real, noise = draw_share(images, 60, step, rank, world_size)
        with autocast(images.device.type, dtype):
            fake = generator.net(noise)
            answers = discriminator.net(real), discriminator.net(fake.detach())
            loss = discriminator_loss(*answers)
        discriminator.learn(loss, average_flat)
        with autocast(images.device.type, dtype):
            loss = generator_loss(discriminator.net(fake))
        generator.learn(loss, average_flat)
        if step + 1 in keep:
            samples[step + 1] = generator.net(fixed).detach().float()
    players = generator, discriminator
    return torch.cat([flat_parameters(player.net) for player in players]), samples


# The same with DistributedDataParallel around both


def count_sent(**models: DistributedDataParallel) -> dict[str, int]:
    """All ranks average each bucket of the models; its numbers are added to sent[name]."""
    sent = dict.fromkeys(models, 0)
    for name, model in models.items():

        def hook(name: str, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            sent[name] += bucket.buffer().numel()
            return allreduce_hook(dist.group.WORLD, bucket)

        model.register_comm_hook(name, hook)
    return sent


class PairResult(NamedTuple):
    """The parameters of both networks, and how many numbers each handed to all_reduce."""

    generator: torch.Tensor
    discriminator: torch.Tensor
    sent: dict[str, int]


def train_wrapped_pair(
    rank: int,
    world_size: int,
    detach: bool = True,
    retain: bool = False,
    unwrap: bool = True,
    steps: int = 2,
) -> PairResult:
    """All ranks average the gradients of two DDP modules, each during its own backward."""
    torch.manual_seed(0)
    generator = DistributedDataParallel(new_generator())
    discriminator = DistributedDataParallel(new_discriminator())
    sent = count_sent(generator=generator, discriminator=discriminator)
    generator_sgd = torch.optim.SGD(generator.parameters(), lr=0.1)
    discriminator_sgd = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    images = real_images()
    for step in range(steps):
        real, noise = draw_share(images, 60, step, rank, world_size)
        fake = generator(noise)
        discriminator_sgd.zero_grad()
        discriminator_backward(discriminator, real, fake, detach, retain)
        discriminator_sgd.step()
        generator_sgd.zero_grad()
        generator_backward(discriminator, fake, unwrap)
        generator_sgd.step()
    return PairResult(flat_parameters(generator), flat_parameters(discriminator), sent)


def discriminator_backward(
    discriminator: DistributedDataParallel,
    real: torch.Tensor,
    fake: torch.Tensor,
    detach: bool,
    retain: bool,
) -> None:
    """All ranks average the discriminator's gradients: one forward, real and made together.

    `detach` cuts the graph to the generator; `retain` keeps the graph after backward.
    """
    made = fake.detach() if detach else fake
    answers = discriminator(torch.cat([real, made]))
    discriminator_loss(*answers.chunk(2)).backward(retain_graph=retain)


def generator_backward(
    discriminator: DistributedDataParallel, fake: torch.Tensor, unwrap: bool
) -> None:
    """All ranks average the generator's gradients, which come through the discriminator.

    `unwrap` goes through its bare module, frozen, so that none of its own are averaged.
    """
    discriminator.requires_grad_(not unwrap)
    answers = discriminator.module(fake) if unwrap else discriminator(fake)
    generator_loss(answers).backward()
    discriminator.requires_grad_(True)
