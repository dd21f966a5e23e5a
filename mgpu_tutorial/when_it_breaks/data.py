"""What the broken jobs read. Do not look here before you have named the fault."""

from collections.abc import Callable

import torch

UNLABELLED = -1


def labels_of(rank: int) -> torch.Tensor:
    """Four batches of two labels from 0 to 2, of shape (4, 2); some samples have none."""
    labels = (torch.arange(8).reshape(4, 2) + rank) % 3
    labels[0, 1] = UNLABELLED
    if rank == 1:
        labels[2] = UNLABELLED  # a whole batch
    return labels


def points_of(rank: int, step: int) -> torch.Tensor:
    """Three points with two coordinates, of shape (3, 2)."""
    points = torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 3.0]]) + 0.5 * rank + 0.1 * step
    if (rank, step) == (2, 1):
        points[1] = points[0]  # the same sample twice in a row
    return points


def readings(rank: int, step: int, cause: str) -> torch.Tensor:
    """Eight samples of three features and a target, of shape (8, 4), in float64."""
    numbers = torch.arange(24, dtype=torch.float64).reshape(8, 3)
    features = (7 * numbers + 5 * rank + 3 * step) % 11 / 11 - 0.5
    targets = (features - features[0]) @ torch.tensor([1.0, 2.0, -1.0]).double()
    if (cause, rank, step) == ("D", 1, 5):
        targets[3] += 100  # a mistake in the data
    if (cause, rank, step) == ("C", 1, 5):
        features += 2.0**27 + 8  # a clock that counts from long ago
    return torch.cat([features, targets[:, None]], dim=1)


def card_of(rank: int, step: int, cause: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """What the rank's card makes of a right gradient: the same, or one number is another."""
    error = torch.tensor([0.0, 100.0, 0.0])
    is_bad = (cause, rank, step) == ("A", 2, 5)
    return lambda gradient: gradient + error if is_bad else gradient


def rate_of(step: int, cause: str) -> float:
    """The learning rate of a step, by a schedule."""
    return 40.0 if (cause, step) == ("B", 4) else 0.2
