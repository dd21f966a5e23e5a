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
    """What computes the loss, Adam of this rank, the step after backward, whole values."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], None]
    full_parameters: Callable[[], dict[str, torch.Tensor]]


def zero_0(module: nn.Module) -> Prepared:
    """Every rank holds everything, and the gradients are averaged."""
    optimizer = Adam(module.parameters(), lr=0.01)

    def step() -> None:
        average_gradients(module)
        optimizer.step()

    return Prepared(module, optimizer, step, partial(values_of, module))


def zero_1(module: nn.Module) -> Prepared:
    """Every rank keeps the moments of the parameters that it owns."""
    optimizer = ShardedOptimizer(module.parameters(), Adam, lr=0.01)
    return Prepared(module, optimizer.inner, optimizer.step, partial(values_of, module))


def zero_2(module: nn.Module) -> Prepared:
    """Every rank keeps a shard of the gradients, and its moments."""
    flat = FlatParameters(module)
    optimizer = Adam([flat.shard], lr=0.01)
    return Prepared(
        module, optimizer, partial(flat.step, optimizer), partial(values_of, module)
    )


def zero_3(module: nn.Module) -> Prepared:
    """Every rank keeps a shard of everything, block by block."""
    model = ShardedModel(module)
    optimizer = Adam(model.parameters(), lr=0.01)
    return Prepared(model, optimizer, optimizer.step, model.full_parameters)


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a module that is whole, by name."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


STAGES = [zero_0, zero_1, zero_2, zero_3]
Prepare = Callable[[nn.Module], Prepared]  # one of them
