"""The stages of ZeRO side by side: each prepares a module, which then takes equal steps."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Adam

from mgpu_tutorial.distributed_sgd.sgd import average_gradients
from mgpu_tutorial.sharding.wrappers import ShardedModel, ShardedOptimizer
from mgpu_tutorial.sharding.zero2 import FlatParameters


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

    def step() -> None:
        average_gradients(module)
        optimizer.step()

    return Prepared(module, optimizer, step)


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
Prepare = Callable[..., Prepared]  # one of them
