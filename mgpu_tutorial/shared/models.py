"""Networks that several chapters share."""

import torch
from torch import nn
from torch.nn.functional import log_softmax, max_pool2d, relu

NORMS = {
    "": nn.Identity,
    "batch": lambda: nn.BatchNorm2d(10),
    "group": lambda: nn.GroupNorm(2, 10),
}


class SmallConvNet(nn.Module):
    """A small convolutional network for MNIST's digits: 21 840 parameters.

    Takes images (N, 1, 28, 28) and returns log probabilities (N, 10). `dropout` is 0 where
    two runs shall be equal: dropout draws other numbers on every rank. `norm` puts a
    normalisation behind the first convolution: "batch", "group", or "" for none.
    """

    def __init__(self, dropout: float = 0.0, norm: str = "") -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.norm = NORMS[norm]()
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.drop = nn.Dropout(dropout)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = relu(max_pool2d(self.norm(self.conv1(images)), 2))
        x = relu(max_pool2d(self.drop(self.conv2(x)), 2))
        x = relu(self.fc1(x.flatten(1)))
        return log_softmax(self.fc2(self.drop(x)), dim=1)
