"""The model on which the wrappers are tried, its batches, a slow network, and training."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP, NaiveDDP
from mgpu_tutorial.shared.cost_model.links import Link, ring_seconds
from mgpu_tutorial.shared.slow_link import slow_link

Wrapper = type[nn.Module]
WRAPPERS = {  # with buckets that hold few layers of a Tower
    NaiveDDP: {},
    BucketedDDP: {"bucket_cap_mb": 0.02},
    DistributedDataParallel: {"bucket_cap_mb": 0.02},
}


class Tower(nn.Module):
    """Square layers and a small head, which is defined first and used last."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.head = nn.Linear(width, 10)
        self.body = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body:
            x = torch.relu(layer(x))
        return self.head(x)


@dataclass(frozen=True)
class Setting:
    """A Tower of `width` and `depth`, a rank's `batch`, and the network between the ranks.

    `pause` is in seconds, for the backward of each layer. `link` replaces this machine's own
    network, and `model` is a kind of Tower.
    """

    width: int
    depth: int = 6
    batch: int = 8
    pause: float = 0.0
    link: Link | None = None
    model: type[Tower] = Tower

    def tower(self) -> Tower:
        def slow_backward(layer: nn.Module, x: tuple, output: torch.Tensor) -> None:
            output.register_hook(lambda gradient: time.sleep(self.pause))

        tower = self.model(self.width, self.depth)
        for layer in tower.body if self.pause else []:
            layer.register_forward_hook(slow_backward)
        return tower

    def inputs(self) -> torch.Tensor:
        return torch.randn(self.batch, self.width)

    def network(self, world_size: int) -> AbstractContextManager:
        """Inside, an all_reduce takes as long as a ring of `world_size` over the link."""
        if self.link is None:
            return nullcontext()
        return slow_link(lambda nbytes: ring_seconds(nbytes, world_size, self.link))


def finish_gradient_synchronization(model: nn.Module) -> None:
    """All ranks wait for the mean gradients; torch's DDP has done so inside backward."""
    getattr(model, "finish_gradient_synchronization", lambda: None)()


def calling_from_python(model: nn.Module) -> nn.Module:
    """The same model; torch's DDP makes its all_reduces in Python from now on.

    In C++, neither the trace nor a slow link would see them.
    """
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, allreduce_hook)
    return model


def shares(rank: int, world_size: int, steps: int, width: int) -> list[torch.Tensor]:
    """This rank's share of `steps` global batches of 24 samples, the same for every N."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(steps, 24, width, generator=generator, device="cpu")
    mine = whole.tensor_split(world_size, dim=1)[rank]
    return list(mine.to(torch.get_default_device()))


def train(
    rank: int,
    world_size: int,
    wrapper: Wrapper | None,
    steps: int,
    new_tower: Callable[[], Tower] = Tower,
    break_it: Callable | None = None,
    **options: float | bool,
) -> Iterator[nn.Module]:
    """The ranks train a Tower, each on its shares; yields the model before and after a step.

    None is one process, unwrapped. `break_it` gets model and optimizer before the steps.
    """
    torch.manual_seed(rank)  # a different start on each rank: rank 0's must win
    model = wrapper(new_tower(), **options) if wrapper else new_tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if break_it:
        break_it(model, optimizer)
    yield model
    for batch in shares(rank, world_size, steps, width=64):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        finish_gradient_synchronization(model)
        optimizer.step()
        yield model


def train_replicas(
    rank: int,
    world_size: int,
    wrapper: Wrapper | None = None,
    steps: int = 10,
    **options: float | bool,
) -> list[list[torch.Tensor]]:
    """The last gradients and the parameters of a Tower that was trained."""
    *_, model = train(rank, world_size, wrapper, steps, **options)
    return [[p.grad for p in model.parameters()], [p.detach() for p in model.parameters()]]
