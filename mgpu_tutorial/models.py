"""Networks that several chapters share."""

import torch
from torch import nn
from torch.nn.functional import log_softmax, max_pool2d, relu


class SmallConvNet(nn.Module):
    """The small convolutional network of the classic MNIST example: 21 840 parameters.

    Takes images (N, 1, 28, 28) and returns log probabilities (N, 10). `dropout` is 0 where
    two runs shall be equal: dropout draws other numbers on every rank.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.drop = nn.Dropout(dropout)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = relu(max_pool2d(self.conv1(images), 2))
        x = relu(max_pool2d(self.drop(self.conv2(x)), 2))
        x = relu(self.fc1(x.flatten(1)))
        return log_softmax(self.fc2(self.drop(x)), dim=1)
