"""Linear layers of which every rank has a piece: by columns, and by rows.

The names are those of Y = X A, in which A has a column per output. PyTorch stores its
transpose, so columns of A are rows of `weight`.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear, pad

from mgpu_tutorial.tensor_parallel.operators import CopyToRanks, Group, Operator, SumOverRanks


class Piece(nn.Parameter):
    """This rank's part of a parameter. A parameter that is no Piece is whole on every rank.

    `cut` is the dimension along which it was cut, `whole` how long that was, and `padding`
    how many zeros were added so that all pieces are equal.
    """

    cut: int
    whole: int
    group: Group


def piece_of(
    parameter: nn.Parameter | None, dim: int, group: Group, padded: bool = False
) -> Piece | None:
    """Cut a parameter that all ranks have into equal parts along `dim`, and take this rank's.

    Raises ValueError, on every rank alike, where it cannot be cut evenly and must not be
    `padded` with zeros.
    """
    if parameter is None:
        return None
    ranks, length = dist.get_world_size(group), parameter.shape[dim]
    missing = -length % ranks
    if missing and not padded:
        raise ValueError(f"{length} features cannot be cut into {ranks} equal pieces")
    values = parameter.detach()
    if missing:
        values = pad(values, (0, 0) * (values.dim() - 1 - dim) + (0, missing))
    mine = values.chunk(ranks, dim)[dist.get_rank(group)].clone()
    piece = Piece(mine, parameter.requires_grad)
    piece.cut, piece.whole, piece.group = dim, length, group
    return piece


def whole_of(parameter: nn.Parameter) -> torch.Tensor:
    """The whole values of a parameter, on every rank; all ranks of its group call it."""
    if not isinstance(parameter, Piece):
        return parameter.detach()
    return joined(parameter.detach(), parameter)


def joined(mine: torch.Tensor, piece: Piece) -> torch.Tensor:
    """What all ranks have beside `piece`, its values or its gradient, put together."""
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(piece.group))]
    dist.all_gather(every, mine.contiguous(), group=piece.group)
    return torch.cat(every, piece.cut).narrow(piece.cut, 0, piece.whole)


class ColumnParallelLinear(nn.Module):
    """Every rank computes some of the output features, from an input that all of them have.

    Made of a linear layer that all ranks have alike. (batch, sequence, inputs) becomes
    (batch, sequence, outputs / ranks). `enter` is what is done to the input first; None for
    one of several layers that share an input, on which it is done once.
    """

    def __init__(
        self, whole: nn.Linear, group: Group = None, enter: Operator | None = CopyToRanks
    ) -> None:
        super().__init__()
        self.weight = piece_of(whole.weight, 0, group)
        self.bias = piece_of(whole.bias, 0, group)
        self.group, self.enter = group, enter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.enter is not None:
            x = self.enter.apply(x, self.group)
        return linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Every rank has some of the input features, and the ranks add up what they make of them.

    Made of a linear layer that all ranks have alike. (batch, sequence, inputs / ranks)
    becomes (batch, sequence, outputs), or a slice of the sequence, after `leave`. The bias
    is whole on every rank and is added once, to the sum.
    """

    def __init__(
        self, whole: nn.Linear, group: Group = None, leave: Operator = SumOverRanks
    ) -> None:
        super().__init__()
        self.weight = piece_of(whole.weight, 1, group)
        self.bias = whole.bias
        self.group, self.leave = group, leave

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        total = self.leave.apply(linear(part, self.weight), self.group)
        return total if self.bias is None else total + self.bias


# Two products in a row, with numbers small enough to follow

X = torch.tensor([[1, 2], [3, 4]])  # two tokens with two features
A = torch.tensor([[1, 0, 2, 1], [0, 1, 1, 3]])
B = torch.tensor([[1, 2], [0, 1], [1, 0], [2, 1]])


class Product(NamedTuple):
    """What one rank had of A and of B, and what it computed from that."""

    columns: torch.Tensor
    rows: torch.Tensor
    hidden: torch.Tensor
    part: torch.Tensor
    result: torch.Tensor


def multiply(rank: int, world_size: int) -> Product:
    """Each rank takes columns of A and the same rows of B; the ranks add what comes out."""
    columns = A.tensor_split(world_size, dim=1)[rank]
    rows = B.tensor_split(world_size, dim=0)[rank]
    hidden = X @ columns  # finished numbers, for some of the features
    part = hidden @ rows  # all numbers, but each only a part of its sum
    result = part.clone()
    dist.all_reduce(result)
    return Product(columns, rows, hidden, part, result)
