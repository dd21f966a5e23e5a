"""Between the products every rank has some tokens of each sequence: two operators for that.

Activations are (batch, sequence, features). Where the shared part begins the ranks gather
the sequence, and where it ends they scatter it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import embedding

from mgpu_tutorial.shared.models import SmallTransformer
from mgpu_tutorial.tensor_parallel.block import copies
from mgpu_tutorial.tensor_parallel.layers import Group
from mgpu_tutorial.tensor_parallel_in_practice import vocabulary


class GatherSequence(torch.autograd.Function):
    """In place of f: all-gather in forward, and reduce-scatter in backward."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, group: Group = None) -> torch.Tensor:
        ctx.group = group
        return gathered(mine, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return scattered_sum(gradient, ctx.group), None


class ScatterSequence(torch.autograd.Function):
    """In place of g: reduce-scatter in forward, and all-gather in backward."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Group = None) -> torch.Tensor:
        ctx.group = group
        return scattered_sum(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gathered(gradient, ctx.group), None


def gathered(mine: torch.Tensor, group: Group = None) -> torch.Tensor:
    """(batch, sequence / ranks, features) of each rank as (batch, sequence, features)."""
    ranks = dist.get_world_size(group)
    every = mine.new_empty(ranks * len(mine), *mine.shape[1:])  # one rank's below another's
    dist.all_gather_single(every, mine.contiguous(), group=group)
    return torch.cat(every.chunk(ranks), dim=1)


def scattered_sum(part: torch.Tensor, group: Group = None) -> torch.Tensor:
    """The sum of all ranks' (batch, sequence, features): to each rank some of its tokens."""
    ranks, (batch, length, features) = dist.get_world_size(group), part.shape
    mine = part.new_empty(batch, length // ranks, features)
    dist.reduce_scatter_single(mine, torch.cat(part.chunk(ranks, dim=1)), group=group)
    return mine


class Positions(nn.Module):
    """The embeddings of this rank's places; the table is a copy."""

    def __init__(self, whole: nn.Embedding, group: Group = None) -> None:
        super().__init__()
        self.weight, self.group = whole.weight, group

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        mine = places.chunk(dist.get_world_size(self.group))[dist.get_rank(self.group)]
        return embedding(mine, self.weight)


def parallelize(model: SmallTransformer, group: Group = None) -> SmallTransformer:
    """Cut a whole model; between the products every rank then has some of the tokens."""
    vocabulary.parallelize(model, group)
    model.position = Positions(model.position, group)
    for layer in model.modules():
        if hasattr(layer, "f"):
            layer.f = GatherSequence
        if hasattr(layer, "g"):
            layer.g = ScatterSequence
    return model


def sum_copies(model: nn.Module, group: Group = None) -> nn.Module:
    """In each backward, sum the gradients of the copies over the ranks."""

    def sum_gradient(parameter: nn.Parameter) -> None:
        dist.all_reduce(parameter.grad, group=group)

    for parameter in copies(model).values():
        parameter.register_post_accumulate_grad_hook(sum_gradient)
    return model
