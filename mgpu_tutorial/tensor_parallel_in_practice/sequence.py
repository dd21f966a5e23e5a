"""Between the products every rank has some tokens of each sequence: two operators for that.

Activations are (batch, sequence, features). Where the shared part begins the ranks gather
the sequence, and where it ends they scatter it.
"""

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.shared.groups import size_of
from mgpu_tutorial.tensor_parallel.block import copies
from mgpu_tutorial.tensor_parallel.layers import Group, sum_of


def gathered(mine: torch.Tensor, group: Group = None) -> torch.Tensor:
    """(batch, sequence / ranks, features) of each rank as (batch, sequence, features)."""
    ranks = size_of(group)  # a rank that is not in the group gets an error
    every = mine.new_empty(ranks * len(mine), *mine.shape[1:])
    dist.all_gather_single(every, mine.contiguous(), group=group)
    # one rank's batch lies below the other's: lay them side by side
    return torch.cat(every.chunk(ranks), dim=1)


def scattered_sum(part: torch.Tensor, group: Group = None) -> torch.Tensor:
    """The sum of all ranks' (batch, sequence, features): to each rank some of its tokens."""
    ranks = size_of(group)
    batch, length, features = part.shape
    if length % ranks:
        raise ValueError(f"{length} tokens have no {ranks} equal parts")
    mine = part.new_empty(batch, length // ranks, features)
    # one rank's tokens below the other's
    below = torch.cat(part.chunk(ranks, dim=1))
    dist.reduce_scatter_single(mine, below, group=group)
    return mine


class GatherSequence(torch.autograd.Function):
    """In place of f: all-gather in forward, and reduce-scatter in backward."""

    @staticmethod
    def forward(ctx, mine: torch.Tensor, group: Group = None) -> torch.Tensor:
        ctx.group = group
        return gathered(mine, group)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return scattered_sum(gradient, ctx.group), None


class ScatterSequence(torch.autograd.Function):
    """In place of g: reduce-scatter in forward, and all-gather in backward."""

    @staticmethod
    def forward(ctx, part: torch.Tensor, group: Group = None) -> torch.Tensor:
        ctx.group = group
        return scattered_sum(part, group)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gathered(gradient, ctx.group), None


def cut_sequence(
    model: nn.Module,
    group: Group = None,
    gather: type = GatherSequence,
    scatter: type = ScatterSequence,
) -> nn.Module:
    """Let each rank of a model that is cut have some of the tokens between the products.

    Before training call `sum_copies` too: each rank's norms see its own tokens only.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    # only the positions of this rank's tokens are looked up
    model.position.register_forward_pre_hook(lambda _, given: given[0].chunk(ranks)[rank])
    for layer in model.modules():
        if hasattr(layer, "f"):
            layer.f = gather
        if hasattr(layer, "g"):
            layer.g = scatter
    return model


def sum_copies(model: nn.Module, group: Group = None) -> nn.Module:
    """In each backward, sum the new gradients of the copies over the ranks.

    Those of a copy that is frozen now and trained later too. Call it once, after
    `cut_sequence`.
    """
    for p in copies(model).values():
        is_trained = p.requires_grad
        p.requires_grad_().register_hook(lambda gradient: sum_of(gradient, group))
        p.requires_grad_(is_trained)
    return model
