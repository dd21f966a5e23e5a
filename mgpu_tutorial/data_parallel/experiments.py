"""The networks on which DataParallel is tried."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class PixelNet(nn.Module):
    """Says for each pixel of (N, 3, H, W) which of `classes` it is: (N, classes, H, W)."""

    def __init__(self, hidden: int = 16, classes: int = 20) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, hidden, 3, padding=1)
        self.norm = nn.BatchNorm2d(hidden)
        self.head = nn.Conv2d(hidden, classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(images))))


class WithLoss(nn.Module):
    """Computes the loss where the outputs are: every replica returns one number."""

    def __init__(self, module: nn.Module, reduction: str = "mean") -> None:
        super().__init__()
        self.module, self.reduction = module, reduction

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.module(images), labels, reduction=self.reduction)


class Counting(nn.Module):
    """Counts its calls in an attribute and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("calls_in_buffer", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.calls_in_buffer += 1
        return x
