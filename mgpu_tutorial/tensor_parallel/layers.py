"""Linear layers on several ranks, by columns and by rows, and the two operators around them.

The names are those of Y = X A, in which A has a column per output. PyTorch stores the
transpose of A as `weight`, so columns of A are rows of `weight`. `group` are the ranks that
share a product; None stands for all ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear

from mgpu_tutorial.shared.groups import size_of

Group = dist.ProcessGroup | None


class CopyToRanks(torch.autograd.Function):
    """f: all ranks use the same input, so its gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Group = None) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_of(gradient, ctx.group), None


class SumOverRanks(torch.autograd.Function):
    """g: the output is the sum of the ranks' parts, so each has the output's gradient."""

    @staticmethod
    def forward(ctx, part: torch.Tensor, group: Group = None) -> torch.Tensor:
        return sum_of(part, group)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def sum_of(part: torch.Tensor, group: Group = None) -> torch.Tensor:
    """The sum of all ranks' tensors, on every rank; `part` stays as it is."""
    size_of(group)  # refuses a rank that is not in the group
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class Shard(nn.Parameter):
    """This rank's part of a parameter, cut along the dimension `cut`."""

    cut: int
    group: Group


def shard(parameter: nn.Parameter, dim: int, group: Group = None) -> nn.Parameter:
    """This rank's part of a tensor that all have; ValueError where parts can't be equal."""
    ranks, length = size_of(group), parameter.shape[dim]
    if length % ranks:
        raise ValueError(f"{length} features have no {ranks} equal parts")
    part = parameter  # of one rank, so that a tie to another layer lasts
    if ranks > 1:
        mine = parameter.detach().chunk(ranks, dim)[dist.get_rank(group)]
        part = Shard(mine.clone(), parameter.requires_grad)  # frozen, if the whole is
    part.cut, part.group = dim, group
    return part


class PartOfLinear(nn.Module):
    """A rank's part of an nn.Linear; TypeError for a layer that computes something else."""

    def __init__(self, whole: nn.Module, group: Group) -> None:
        super().__init__()
        if type(whole).forward is not nn.Linear.forward:
            raise TypeError(
                f"{type(whole).__name__} is no nn.Linear: give one with the same numbers (in "
                "GPT-2's Conv1D the weight is the transpose)"
            )
        self.group = group


class ColumnParallelLinear(PartOfLinear):
    """(…, inputs), which all ranks have, becomes (…, outputs / ranks)."""

    def __init__(self, whole: nn.Linear, group: Group = None) -> None:
        super().__init__(whole, group)
        self.f = CopyToRanks
        self.weight = shard(whole.weight, 0, group)
        self.bias = None if whole.bias is None else shard(whole.bias, 0, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.f.apply(x, self.group), self.weight, self.bias)


class RowParallelLinear(PartOfLinear):
    """(…, inputs / ranks) becomes (…, outputs) on all ranks; the bias is added to the sum."""

    def __init__(self, whole: nn.Linear, group: Group = None) -> None:
        super().__init__(whole, group)
        self.g = SumOverRanks
        self.weight = shard(whole.weight, 1, group)
        self.bias = whole.bias

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        if part.shape[-1:] != self.weight.shape[1:]:
            raise ValueError(f"{tuple(part.shape)}: give this rank's part")
        total = self.g.apply(linear(part, self.weight), self.group)
        return total if self.bias is None else total + self.bias
