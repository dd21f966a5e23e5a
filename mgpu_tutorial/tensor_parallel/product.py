"""Two products in a row, with numbers small enough to follow."""

from typing import NamedTuple

import torch
import torch.distributed as dist

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
