"""ZeRO 3: a rank keeps shards, and a parameter is whole only while it is used.

The all-gather and its backward (https://arxiv.org/abs/1910.02054, section 5.3).
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from mgpu_tutorial.sharding.zero2 import flatten, shard_of


class Gather(torch.autograd.Function):
    """From this rank's shard to the whole flat tensor."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor) -> torch.Tensor:
        whole = shard.new_empty(dist.get_world_size() * len(shard))
        dist.all_gather_single(whole, shard)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        shard = gradient.new_empty(len(gradient) // dist.get_world_size())
        dist.reduce_scatter_single(shard, gradient)
        return shard / dist.get_world_size()


def chain(shards: list[torch.Tensor], shape: torch.Size, x: torch.Tensor) -> torch.Tensor:
    """Layers one after the other; each weight is gathered when `x` has come to it."""
    for shard in shards:
        weight = Gather.apply(shard)[: shape.numel()].view(shape)
        x = torch.tanh(x @ weight)
    return x


class Unsharded(nn.Module):
    """Keeps a parameter as this rank's shard, and gives the whole one to whoever reads it."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape

    def right_inverse(self, whole: torch.Tensor) -> torch.Tensor:
        return shard_of(flatten([whole])).clone()

    def forward(self, shard: torch.Tensor) -> torch.Tensor:
        return Gather.apply(shard)[: self.shape.numel()].view(self.shape)


def shard_parameters(module: nn.Module) -> None:
    """Keep a shard of every parameter, which is gathered each time it is read."""
    for part in list(module.modules()):
        for name, parameter in list(part.named_parameters(recurse=False)):
            unsharded = Unsharded(parameter.shape)
            register_parametrization(part, name, unsharded, unsafe=True)


def recompute(block: nn.Module) -> None:
    """The block keeps its input only, and computes the rest again in backward."""
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)
