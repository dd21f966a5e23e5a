"""Every test takes the same four images, and the same weights."""

import functools

import pytest
import torch

from mgpu_tutorial.model_parallel.split_resnet import new_resnet50
from mgpu_tutorial.shared.vision import torchvision
from tests.model_parallel.reference import SIDE, one_process


@pytest.fixture(scope="session")
def data():
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(4, 3, SIDE, SIDE, generator=draw)
    return images, torch.randint(1000, (4,), generator=draw)


@pytest.fixture(scope="session")
def weights():
    """Those that all ranks together draw, before any step."""
    return new_resnet50().state_dict()


@pytest.fixture
def whole(weights):
    """torchvision's ResNet-50 with these weights."""
    return torchvisions(weights)


def torchvisions(weights):
    with torch.device("meta"):
        model = torchvision.models.resnet50()
    copies = {name: values.clone() for name, values in weights.items()}
    model.load_state_dict(copies, assign=True)
    return model


@pytest.fixture(scope="session")
def expected(data, weights):
    """`expected(micro)`: mean loss and gradients of one process in as many micro-batches."""
    return functools.cache(lambda micro: one_process(torchvisions(weights), *data, micro))
