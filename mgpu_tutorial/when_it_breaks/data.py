"""What the broken jobs read. Do not look here before you have named the fault."""

import torch

UNLABELLED = -1
LENGTHS = [12, 70, 9, 31, 8, 66, 40, 26]  # tokens of each sequence


def labels_of(rank: int) -> torch.Tensor:
    """Four batches of two labels from 0 to 2, of shape (4, 2); some samples have none."""
    labels = (torch.arange(8).reshape(4, 2) + rank) % 3
    labels[0, 1] = UNLABELLED
    if rank == 1:
        labels[2] = UNLABELLED  # a whole batch
    return labels


def classes() -> torch.Tensor:
    """The classes of twelve samples; the last is at every third place and nowhere else."""
    return torch.tensor([0, 3, 1, 2, 3, 0, 1, 3, 2, 0, 3, 1])


def points_of(rank: int, step: int) -> torch.Tensor:
    """Three points with two coordinates, of shape (3, 2)."""
    points = torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 3.0]]) + 0.5 * rank + 0.1 * step
    if (rank, step) == (2, 1):
        points[1] = points[0]  # the same sample twice in a row
    return points
