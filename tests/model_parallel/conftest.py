"""torchvision's ResNet-50, drawn once, and four small images."""

import copy

import pytest
import torch

from mgpu_tutorial.shared.vision import torchvision


@pytest.fixture(scope="session")
def data():
    """Of 40 x 40 pixels: layer4 puts out two by two, so BatchNorm takes a single image."""
    draw = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, 40, 40, generator=draw), torch.randint(
        1000, (4,), generator=draw
    )


@pytest.fixture(scope="session")
def drawn():
    torch.manual_seed(0)
    return torchvision.models.resnet50()


@pytest.fixture
def whole(drawn):
    return copy.deepcopy(drawn)
