"""What the chapter trains; and the stages of ZeRO, each of which prepares a module."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Adam

from mgpu_tutorial.distributed_sgd.sgd import average_gradients
from mgpu_tutorial.sharding.wrappers import ShardedModel, ShardedOptimizer
from mgpu_tutorial.sharding.zero2 import FlatParameters
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


class Prepared(NamedTuple):
    """What computes the loss, the optimizer of this rank, and the step after backward."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], None]

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """The whole parameters by name, on every rank; all ranks call it."""
        if isinstance(self.model, ShardedModel):
            return self.model.full_parameters()
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


ADAM = partial(Adam, lr=0.01)


def zero_0(module: nn.Module, kind: Callable = ADAM) -> Prepared:
    """Every rank holds everything, and the gradients are averaged."""
    optimizer = kind(module.parameters())
    optimizer.register_step_pre_hook(lambda *_: average_gradients(module))
    return Prepared(module, optimizer, optimizer.step)


def zero_1(module: nn.Module, kind: Callable = ADAM) -> Prepared:
    """Every rank keeps the moments of the parameters that it owns."""
    optimizer = ShardedOptimizer(module.parameters(), kind)
    return Prepared(module, optimizer.inner, optimizer.step)


def zero_2(module: nn.Module, kind: Callable = ADAM) -> Prepared:
    """Every rank keeps a shard of the gradients, and its moments."""
    flat = FlatParameters(module)
    optimizer = kind([flat.shard])
    return Prepared(module, optimizer, partial(flat.step, optimizer))


def zero_3(module: nn.Module, kind: Callable = ADAM) -> Prepared:
    """Every rank keeps a shard of everything, block by block."""
    model = ShardedModel(module)
    optimizer = kind(p for p in model.parameters() if p.requires_grad)
    return Prepared(model, optimizer, optimizer.step)


STAGES = [zero_0, zero_1, zero_2, zero_3]
