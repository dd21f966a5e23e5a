"""What is sent where a layer in pieces begins and ends: two pairs of operators.

In each pair the one is the other's backward. In the first, all ranks have the whole
activations outside the pieces; in the second each has a slice of the sequence. Activations
are (batch, sequence, features).
"""

from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None  # None: all ranks


class CopyToRanks(torch.autograd.Function):
    """Every rank uses the same input for its piece, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_of(gradient, ctx.group), None


class SumOverRanks(torch.autograd.Function):
    """The result is the sum of all ranks' parts, so each part has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Group) -> torch.Tensor:
        return sum_of(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class GatherSequence(torch.autograd.Function):
    """Every rank gets the slices of all: all-gather, and in backward reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return gathered(mine, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return scattered_sum(gradient, ctx.group), None


class ScatterSequence(torch.autograd.Function):
    """Every rank gets a slice of the sum of all parts: reduce-scatter, then all-gather."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return scattered_sum(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gathered(gradient, ctx.group), None


Operator = type[torch.autograd.Function]


def sum_of(part: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of all ranks' tensors, on every rank; `part` stays as it is."""
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def gathered(mine: torch.Tensor, group: Group) -> torch.Tensor:
    """(batch, sequence / ranks, features) of each rank as (batch, sequence, features)."""
    ranks = dist.get_world_size(group)
    batch, *rest = mine.shape
    every = mine.new_empty(ranks * batch, *rest)  # one rank's batch below the other's
    dist.all_gather_single(every, mine.contiguous(), group=group)
    return torch.cat(every.chunk(ranks), dim=1)


def scattered_sum(part: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of all ranks' (batch, sequence, features), of which each gets its slice.

    Raises ValueError on every rank where the sequence is no multiple of the ranks.
    """
    ranks = dist.get_world_size(group)
    if part.shape[1] % ranks:
        raise ValueError(
            f"a sequence of {part.shape[1]} tokens cannot be cut into {ranks} equal slices"
        )
    parts = torch.cat(part.chunk(ranks, dim=1))
    mine = part.new_empty(part.shape[0], part.shape[1] // ranks, *part.shape[2:])
    dist.reduce_scatter_single(mine, parts, group=group)
    return mine
