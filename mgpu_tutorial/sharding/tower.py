"""What the chapter trains, and one step of it at each stage of ZeRO."""

import torch
from torch import nn

from mgpu_tutorial.shared.models import MLP


class Residual(MLP):
    """Two linear layers with a GELU between them, added to their input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def new_tower(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Four residual blocks of width 64: 132,352 parameters, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Residual(64) for _ in range(4))).to(dtype)


def loss_of(model: nn.Module, step: int, rank: int, world_size: int) -> torch.Tensor:
    """The loss on this rank's share of the step's 24 samples."""
    generator = torch.Generator(device="cpu").manual_seed(step)
    x = torch.randn(24, 64, generator=generator, dtype=torch.float64, device="cpu")
    mine = x.to(next(model.parameters())).chunk(world_size)[rank]
    return model(mine).square().mean()
