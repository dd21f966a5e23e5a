"""ZeRO 3: a rank keeps shards, and a parameter is whole only while it is used.

The all-gather and its backward (https://arxiv.org/abs/1910.02054, section 5.3).
"""

from typing import Any

import torch
import torch.distributed as dist


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
