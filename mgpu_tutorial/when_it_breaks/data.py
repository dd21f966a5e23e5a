"""What the broken jobs read. Do not look here before you have named the fault."""

from typing import NamedTuple

import torch


def labels_of(rank: int) -> torch.Tensor:
    """Four batches of two labels from 0 to 2, of shape (4, 2); some samples have none: -1."""
    labels = (torch.arange(8).reshape(4, 2) + rank) % 3
    labels[0, 1] = -1
    if rank == 1:
        labels[2] = -1  # a whole batch
    return labels


def points_of(rank: int, step: int) -> torch.Tensor:
    """Three points with two coordinates, of shape (3, 2)."""
    points = torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 3.0]]) + 0.5 * rank + 0.1 * step
    if (rank, step) == (2, 1):
        points[1] = points[0]  # the same sample twice in a row
    return points


class Run(NamedTuple):
    """A training whose loss jumps; its name decides why."""

    name: str

    def batch(self, rank: int, step: int) -> torch.Tensor:
        """Eight samples of three features and a target, of shape (8, 4), in float64."""
        if self.name not in ("A", "B", "C", "D"):
            raise ValueError(f"there is no run {self.name!r}, but A, B, C and D")
        numbers = torch.arange(24, dtype=torch.float64).reshape(8, 3)
        features = (7 * numbers + 5 * rank + 3 * step) % 11 / 11 - 0.5
        targets = (features - features[0]) @ torch.tensor([1.0, 2.0, -1.0]).double()
        if (self.name, rank, step) == ("D", 1, 5):
            targets[3] += 100  # a mistake in the data
        if (self.name, rank, step) == ("C", 1, 5):
            features += 2.0**27 + 8  # a clock that counts from long ago
        return torch.cat([features, targets[:, None]], dim=1)

    def on_gpu(self, gradient: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        """What the rank's GPU makes of a right gradient."""
        is_bad = (self.name, rank, step) == ("A", 2, 5)
        return gradient + torch.tensor([0.0, 100.0, 0.0]) if is_bad else gradient

    def rate(self, step: int) -> float:
        """The learning rate of a step, by a schedule."""
        return 40.0 if (self.name, step) == ("B", 4) else 0.2
