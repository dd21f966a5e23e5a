"""An adversarial pair on several ranks: two networks, two optimizers, two averages.

A generator makes images from noise; a discriminator says whether an image is real. They
train in turns, each on its own loss (I. Goodfellow et al., 2014,
https://arxiv.org/abs/1406.2661). Each has its own optimizer and its own loss scaler, and
all ranks average the gradients of each between its backward and its step.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.distributed_sgd import average_flat, flat_parameters
from mgpu_tutorial.lab import progress
from mgpu_tutorial.mixed_precision.precision import autocast, digest, new_scaler
from mgpu_tutorial.shared.data import digits

NOISE = 16


def generator() -> nn.Module:
    """Noise (N, 16) becomes 8 by 8 pixels from 0 to 1, enlarged to images (N, 784)."""
    layers = [nn.Linear(NOISE, 128), nn.LeakyReLU(0.2), nn.Linear(128, 64), nn.Sigmoid()]
    enlarge = [nn.Unflatten(1, (1, 8, 8)), nn.Upsample((28, 28), mode="bilinear")]
    return nn.Sequential(*layers, *enlarge, nn.Flatten())


def discriminator() -> nn.Module:
    """Images (N, 784) become a number each: positive for "real"."""
    return nn.Sequential(nn.Linear(784, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))


class Player:
    """One of the two networks, with its own optimizer and its own scaler."""

    def __init__(self, net: nn.Module, lr: float, scale: float) -> None:
        self.net = net
        self.optimizer = torch.optim.Adam(net.parameters(), lr, betas=(0.5, 0.99), eps=1e-4)
        self.scaler = new_scaler(net, init_scale=scale, enabled=scale != 1.0)

    def learn(self, loss: torch.Tensor, synchronise: Callable) -> None:
        """All ranks take the same step down this player's loss; the other's stays."""
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        synchronise(self.net)
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def judge_loss(real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Small where the discriminator says "real" of real images and "fake" of fakes."""
    return softplus(-wide(real)).mean() + softplus(wide(fake)).mean()


def forger_loss(fake: torch.Tensor) -> torch.Tensor:
    """Small where the discriminator takes fakes for real."""
    return softplus(-wide(fake)).mean()


def wide(x: torch.Tensor) -> torch.Tensor:
    """At least float32: a loss is a sum, and short numbers are bad at sums."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def real_images() -> torch.Tensor:
    """The training digits as (N, 784), with values between 0 and 1."""
    return (digits().images * 0.325 + 0.306).flatten(1).clamp(0, 1)


def share(rank: int, world_size: int, batch: int, step: int, images: torch.Tensor):
    """This rank's rows of the step's global batch of images, and of its global noise."""
    generator = torch.Generator().manual_seed(step)
    with torch.device("cpu"):  # the same numbers whatever the device
        chosen = torch.randint(len(images), (batch,), generator=generator)
        noise = torch.randn(batch, NOISE, generator=generator)
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
    nets = [make().to(images.dtype) for make in (generator, discriminator)]
    forger, judge = (Player(net, lr, scale) for net in nets)
    fixed, samples = torch.randn(12, NOISE).to(images), {}
    for step in progress(range(steps)):
        real, noise = share(rank, world_size, 60, step, images)
        with autocast(images.device.type, dtype):
            fake = forger.net(noise)
            loss = judge_loss(judge.net(real), judge.net(fake.detach()))
        judge.learn(loss, average_flat)
        with autocast(images.device.type, dtype):
            loss = forger_loss(judge.net(fake))
        forger.learn(loss, average_flat)
        if step + 1 in keep:
            samples[step + 1] = forger.net(fixed).detach().float()
    return torch.cat([flat_parameters(net) for net in nets]), samples


# The same with DistributedDataParallel around both


def count_sent(sent: dict[str, int], **models: DistributedDataParallel) -> None:
    """All ranks average each bucket of the models; its numbers are added to sent[name]."""
    for name, model in models.items():

        def hook(name: str, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            sent[name] += bucket.buffer().numel()
            return allreduce_hook(dist.group.WORLD, bucket)

        model.register_comm_hook(name, hook)


def wrapped_pair(
    rank: int,
    world_size: int,
    detach: bool = True,
    retain: bool = False,
    unwrap: bool = True,
    steps: int = 2,
) -> tuple[str, str, dict[str, int]]:
    """Two DDP modules average in one iteration; returns both digests, and what was sent.

    `unwrap`: the forger's step goes through the judge's bare module, frozen.
    """
    torch.manual_seed(0)
    forger, judge = map(DistributedDataParallel, (generator(), discriminator()))
    sent = {"forger": 0, "judge": 0}
    count_sent(sent, forger=forger, judge=judge)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (judge, forger)]
    images = real_images()
    for step in range(steps):
        real, noise = share(rank, world_size, 60, step, images)
        fake = forger(noise)
        optimizers[0].zero_grad()
        both = judge(torch.cat([real, fake.detach() if detach else fake]))
        judge_loss(*both.chunk(2)).backward(retain_graph=retain)
        optimizers[0].step()
        optimizers[1].zero_grad()
        judge.requires_grad_(not unwrap)
        forger_loss((judge.module if unwrap else judge)(fake)).backward()
        judge.requires_grad_(True)
        optimizers[1].step()
    return digest(forger), digest(judge), sent
