"""One training loop for all stages of ZeRO, and what a rank then holds."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam

from mgpu_tutorial.sharding.gradients import ShardedGradients
from mgpu_tutorial.sharding.model import ShardedModel
from mgpu_tutorial.sharding.optimizer import ShardedOptimizer
from mgpu_tutorial.shared.models import SmallTransformer

VOCABULARY = 64


class Prepared(NamedTuple):
    """A model to train, with what follows backward and the optimizer's step.

    `whole` returns the whole parameters by name, on every rank.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    whole: Callable[[], dict[str, torch.Tensor]]
    after_backward: Callable[[], None] = lambda: None
    after_step: Callable[[], None] = lambda: None


Prepare = Callable[[nn.Module], Prepared]  # a stage of ZeRO


def zero_0(module: nn.Module) -> Prepared:
    """Every rank holds everything, and the gradients are averaged."""
    optimizer = Adam(module.parameters(), lr=0.01)
    average = partial(average_gradients, module)
    return Prepared(module, optimizer, lambda: values_of(module), average)


def zero_1(module: nn.Module) -> Prepared:
    """Every rank has the optimizer state of its share of the parameters."""
    optimizer = ShardedOptimizer(module.parameters(), Adam, lr=0.01)
    average = optimizer.average_gradients
    return Prepared(module, optimizer, lambda: values_of(module), average)


def zero_2(module: nn.Module) -> Prepared:
    """Every rank has a slice of each gradient, and the optimizer state of that slice."""
    model = ShardedGradients(module)
    optimizer = Adam(model.shards, lr=0.01)
    scatter, gather = model.finish_gradient_synchronization, model.gather_parameters
    return Prepared(model, optimizer, lambda: values_of(module), scatter, gather)


def zero_3(module: nn.Module) -> Prepared:
    """Every rank has a slice of everything, unit by unit."""
    model = ShardedModel(module)
    optimizer = Adam(model.parameters(), lr=0.01)
    scatter = model.finish_gradient_synchronization
    return Prepared(model, optimizer, model.full_parameters, scatter)


def average_gradients(module: nn.Module) -> None:
    """Replace each gradient by its mean over all ranks."""
    for parameter in module.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a module that is whole, by name."""
    return {name: p.detach() for name, p in module.named_parameters()}


def new_model(dtype: torch.dtype = torch.float32) -> SmallTransformer:
    """Two blocks and a tied head, 29,312 parameters in 28 tensors, always the same."""
    torch.manual_seed(0)
    return SmallTransformer(VOCABULARY, width=32, heads=4, depth=2).to(dtype)


def loss_of(model: nn.Module, step: int, rank: int, world_size: int) -> torch.Tensor:
    """The loss on this rank's share of the step's twelve sequences of eight tokens."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (12, 8), generator=generator).chunk(world_size)[rank]
    logits = model(tokens)[:, :-1]
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(
    rank: int,
    world_size: int,
    prepare: Prepare,
    steps: int = 10,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Train with a stage of ZeRO; returns the whole parameters, on every rank."""
    prepared = prepare(new_model(dtype))
    for step in range(steps):
        take_step(prepared, step)
    return prepared.whole()


def take_step(prepared: Prepared, step: int) -> None:
    """One step at any stage of ZeRO: the ranks share twelve sequences."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    prepared.optimizer.zero_grad()
    loss_of(prepared.model, step, rank, world_size).backward()
    prepared.after_backward()
    prepared.optimizer.step()
    prepared.after_step()


PREPARE = {0: zero_0, 1: zero_1, 2: zero_2, 3: zero_3}
