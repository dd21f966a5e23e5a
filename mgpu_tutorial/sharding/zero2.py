"""ZeRO 2: all parameters lie in one flat tensor, of which each rank steps a shard.

The two halves of an all-reduce, with the optimizer between them
(https://arxiv.org/abs/1910.02054, section 5.2).
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The tensors side by side, padded with zeros so that all shards are equally long."""
    parts = [tensor.detach().flatten() for tensor in tensors]
    padding = -sum(map(len, parts)) % dist.get_world_size()
    return torch.cat([*parts, parts[0].new_zeros(padding)])


def shard_of(flat: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a flat tensor: a view."""
    return flat.chunk(dist.get_world_size())[dist.get_rank()]


def views_of(flat: torch.Tensor, shapes: Iterable[torch.Size]) -> list[torch.Tensor]:
    """The tensors of these shapes that lie side by side in a flat one."""
    sizes = [shape.numel() for shape in shapes]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class FlatParameters:
    """The parameters of a module in one flat tensor; the optimizer gets `shard`."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.parameters())
        self.flat = flatten(self.parameters)
        views = views_of(self.flat, [p.shape for p in self.parameters])
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
        self.shard = nn.Parameter(shard_of(self.flat))  # a view: a step on it moves them

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduce-scatter the gradients, step this rank's shard, all-gather the new values."""
        gradient = flatten([p.grad for p in self.parameters])
        for parameter in self.parameters:
            parameter.grad = None
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter_single(self.shard.grad, gradient)
        self.shard.grad /= dist.get_world_size()
        optimizer.step()
        dist.all_gather_single(self.flat, self.shard.detach().clone())
