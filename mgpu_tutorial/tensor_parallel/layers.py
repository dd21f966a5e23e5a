"""Linear layers on several ranks, by columns and by rows, and the two operators around them.

The names are those of Y = X A, in which A has a column per output. PyTorch stores the
transpose of A as `weight`, so columns of A are rows of `weight`. `group` are the ranks that
share a product; None stands for all ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear

from mgpu_tutorial.sharding.refusals import require_no_graph
from mgpu_tutorial.shared.groups import copy_in_group, size_of

Group = dist.ProcessGroup | None


class CopyToRanks(torch.autograd.Function):
    """f: all ranks use the same input, so its gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: Group = None) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        require_no_graph("CopyToRanks")
        return sum_of(gradient, ctx.group), None


class SumOverRanks(torch.autograd.Function):
    """g: the output is the sum of the ranks' parts, so each has the output's gradient."""

    @staticmethod
    def forward(ctx, part: torch.Tensor, group: Group = None) -> torch.Tensor:
        return sum_of(part, group)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        require_no_graph("SumOverRanks")
        return gradient, None


def require_numbers(part: torch.Tensor) -> None:
    """ValueError for truths, of which True + True is True."""
    if part.dtype == torch.bool:
        raise ValueError("a sum of torch.bool counts nothing: sum tensor.int()")


def sum_of(part: torch.Tensor, group: Group = None) -> torch.Tensor:
    """The sum of all ranks' tensors, on every rank; `part` stays as it is."""
    size_of(group)  # refuses a rank that is not in the group
    require_numbers(part)
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class Shard(nn.Parameter):
    """This rank's part of a parameter, cut along the dimension `cut`."""

    cut: int
    group: Group


def shard(parameter: torch.Tensor, dim: int, group: Group = None) -> Shard:
    """This rank's part of a tensor that all have; ValueError where parts can't be equal."""
    ranks, length = size_of(group), parameter.shape[dim]
    if isinstance(parameter, Shard):
        raise ValueError("this is a shard already, and a whole layer can be cut once")
    if length % ranks:
        raise ValueError(f"{length} features cannot be cut into {ranks} equal parts")
    mine = parameter.detach().chunk(ranks, dim)[dist.get_rank(group)]
    part = Shard(mine.clone(), parameter.requires_grad)  # frozen, if the whole is
    part.cut, part.group = dim, group
    return part


def copy_shard(part: Shard, memo: dict) -> Shard:
    """A deep copy that knows its cut and group: torch's would be taken for a whole."""
    if id(part) not in memo:
        other = memo[id(part)] = Shard(part.detach().clone(), part.requires_grad)
        other.cut, other.group = part.cut, part.group
    return memo[id(part)]


Shard.__deepcopy__ = copy_shard


def require_linear(whole: nn.Module) -> None:
    """TypeError for a layer that is no product; `shard` refuses one that is cut already."""
    is_cut = isinstance(getattr(whole, "weight", None), Shard)
    if not isinstance(whole, nn.Linear) and not is_cut:
        kind = type(whole).__name__
        raise TypeError(f"{kind} is no product of matrices: give a torch.nn.Linear to cut")


def require_part(part: torch.Tensor, weight: torch.Tensor) -> None:
    """ValueError, before a sum of the ranks, for an input that is not this rank's part."""
    if part.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"an input of shape {tuple(part.shape)}, and this rank multiplies "
            f"{weight.shape[1]} of its features: give the part that a column-parallel layer "
            "leaves, not the whole"
        )


def require_copying(layer: nn.Module, state: dict, prefix: str, how: dict, *_: Any) -> None:
    """ValueError for `load_state_dict(…, assign=True)`: it would replace the shards."""
    if how.get("assign_to_params_buffers"):
        raise ValueError(
            f"assign=True would put a plain parameter in place of the shard {prefix}weight, "
            "which then counts as a copy: leave assign out, and the numbers are copied"
        )


class ColumnParallelLinear(nn.Module):
    """(…, inputs), which all ranks have, becomes (…, outputs / ranks)."""

    f = CopyToRanks
    __deepcopy__ = copy_in_group

    def __init__(self, whole: nn.Linear, group: Group = None) -> None:
        super().__init__()
        require_linear(whole)
        self.weight = shard(whole.weight, 0, group)
        self.bias = None if whole.bias is None else shard(whole.bias, 0, group)
        self.group = group
        self.register_load_state_dict_pre_hook(require_copying)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.f.apply(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """(…, inputs / ranks) becomes (…, outputs) on all ranks; the bias is added to the sum."""

    g = SumOverRanks
    __deepcopy__ = copy_in_group

    def __init__(self, whole: nn.Linear, group: Group = None) -> None:
        super().__init__()
        require_linear(whole)
        self.weight = shard(whole.weight, 1, group)
        self.bias = whole.bias
        self.group = group
        self.register_load_state_dict_pre_hook(require_copying)

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        require_part(part, self.weight)
        total = self.g.apply(linear(part, self.weight), self.group)
        return total if self.bias is None else total + self.bias
