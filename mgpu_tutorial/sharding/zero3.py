"""ZeRO 3: a rank keeps shards, and a parameter is whole only while it is used.

First each parameter by itself, as a parametrization, for any module
(https://arxiv.org/abs/1910.02054, section 5.3).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

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
    """Layers one after the other; each weight is whole while it is used."""
    for shard in shards:
        weight = Gather.apply(shard)[: shape.numel()].view(shape)
        x = torch.tanh(x @ weight)
    return x


class Sharding(nn.Module):
    """A parametrization: the module keeps a shard, and who reads it gets the whole."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape

    def right_inverse(self, whole: torch.Tensor) -> torch.Tensor:
        return shard_of(flatten([whole])).clone()

    def forward(self, shard: torch.Tensor) -> torch.Tensor:
        return Gather.apply(shard)[: self.shape.numel()].view(self.shape)


def shard_parameters(module: nn.Module) -> None:
    """Keep a shard of every parameter of a module on each rank."""
    for part in list(module.modules()):
        for name, parameter in list(part.named_parameters(recurse=False)):
            rule = Sharding(parameter.shape)
            register_parametrization(part, name, rule, unsafe=True)
