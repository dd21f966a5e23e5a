"""Two networks that train in turns on several ranks, under one loss scaler."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import softplus
from torch.optim import Adam, Optimizer

from mgpu_tutorial.distributed_sgd.sgd import average_gradients

Turn = tuple[nn.Module, Optimizer, Callable[[], Tensor]]


def take_turns(turns: Sequence[Turn], scaler: GradScaler) -> None:
    """Each network takes its step from its own loss, on all ranks, under one scaler."""
    for network, optimizer, loss_of in turns:
        loss = loss_of()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        average_gradients(network)
        scaler.step(optimizer)
    scaler.update()


def tells_apart(
    generator: nn.Module, discriminator: nn.Module, real: Tensor, noise: Tensor
) -> Tensor:
    """The discriminator's loss: real images should score high, and made ones low."""
    made = generator(noise).detach()
    high, low = discriminator(real).float(), discriminator(made).float()
    return softplus(-high).mean() + softplus(low).mean()


def fools(generator: nn.Module, discriminator: nn.Module, noise: Tensor) -> Tensor:
    """The generator's loss: what it makes should score high."""
    return softplus(-discriminator(generator(noise)).float()).mean()


def train_pair(
    rank: int,
    world_size: int,
    take_turns: Callable,
    pair: tuple[nn.Module, nn.Module],
    images: Tensor,
    dtype: torch.dtype = torch.float32,
    infinite: tuple[int, int] | None = None,
) -> tuple[list[Tensor], float, list[int]]:
    """All ranks train a generator and a discriminator for ten iterations.

    `infinite` = (rank, step) spoils the real images of one rank in one iteration. Returns
    the parameters of both, the scale, and how many steps each optimizer took.
    """
    short = torch.autocast(images.device.type, dtype, enabled=dtype.itemsize == 2)
    optimizers = [Adam(network.parameters(), lr=5e-3) for network in pair]
    scaler = GradScaler(images.device.type, init_scale=1024.0)
    mine = slice(rank * 60 // world_size, (rank + 1) * 60 // world_size)
    for step in range(10):
        random = torch.Generator().manual_seed(step)  # every rank draws the same batch
        real = images[torch.randint(len(images), (60,), generator=random)][mine]
        noise = torch.randn(60, 16, generator=random)[mine].to(images.device)
        if infinite == (rank, step):
            real = real * float("inf")
        first = partial(short(tells_apart), *pair, real, noise)
        second = partial(short(fools), *pair, noise)
        turns = [(pair[1], optimizers[1], first), (pair[0], optimizers[0], second)]
        take_turns(turns, scaler)
    steps = [int(o.state_dict()["state"][0]["step"]) for o in optimizers]
    parameters = [p.detach() for network in pair for p in network.parameters()]
    return parameters, scaler.get_scale(), steps
