"""An adversarial pair on several ranks: two networks, two optimizers, two averages.

A generator makes images from noise; a discriminator says whether an image is real. They
train in turns, each on its own loss (I. Goodfellow et al., 2014,
https://arxiv.org/abs/1406.2661). Each has its own optimizer, one loss scaler serves both,
and all ranks average the gradients of each network between its backward and its step.
"""

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import softplus
from torch.optim import Adam

from mgpu_tutorial.distributed_sgd.sgd import average_gradients, flat_parameters


def descend(network: nn.Module, optimizer: Adam, scaler: GradScaler, loss: torch.Tensor):
    """All ranks average the gradients of one network; then its optimizer steps, or skips."""
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    average_gradients(network)
    scaler.step(optimizer)  # unscales first


def train_pair(
    rank: int,
    world_size: int,
    generator: nn.Module,
    discriminator: nn.Module,
    images: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    infinite: tuple[int, int] | None = None,
    growth_interval: int = 2000,
) -> tuple[torch.Tensor, float, list[int]]:
    """All ranks train both networks in turns for ten steps; one scaler serves both.

    `infinite` = (rank, step) spoils a loss of the discriminator. Returns the parameters of
    both networks, the scale, and the steps that each optimizer took, the generator first.
    """
    device = images.device.type
    optimizers = [Adam(net.parameters(), lr=5e-3) for net in (generator, discriminator)]
    scaler = GradScaler(device, init_scale=1024.0, growth_interval=growth_interval)
    mine = slice(rank * 60 // world_size, (rank + 1) * 60 // world_size)
    for step in range(10):
        random = torch.Generator().manual_seed(step)  # every rank draws the same batch
        real = images[torch.randint(len(images), (60,), generator=random)][mine]
        noise = torch.randn(60, 16, generator=random)[mine]
        # the discriminator learns to tell real images from made ones
        with torch.autocast(device, dtype, enabled=dtype.itemsize == 2):
            made = generator(noise)
            says_real, says_made = discriminator(real), discriminator(made.detach())
        loss = softplus(-says_real.float()).mean() + softplus(says_made.float()).mean()
        if infinite == (rank, step):
            loss = loss * float("inf")
        descend(discriminator, optimizers[1], scaler, loss)
        # the generator learns to make images that the discriminator takes for real
        with torch.autocast(device, dtype, enabled=dtype.itemsize == 2):
            says_made = discriminator(made)
        descend(generator, optimizers[0], scaler, softplus(-says_made.float()).mean())
        scaler.update()  # once, when both optimizers have had their step
    both = flat_parameters(nn.ModuleList([generator, discriminator]))
    states = [optimizer.state_dict()["state"][0] for optimizer in optimizers]
    return both, scaler.get_scale(), [int(state["step"]) for state in states]
