"""One core stands for one device, and every test takes the same four images."""

import pytest
import torch

from mgpu_tutorial.model_parallel import split_resnet as resnet
from mgpu_tutorial.shared.vision import torchvision
from tests.model_parallel.reference import SIDE, one_process


@pytest.fixture(autouse=True)
def one_core_for_each_device():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def data():
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(4, 3, SIDE, SIDE, generator=draw)
    return images, torch.randint(1000, (4,), generator=draw)


@pytest.fixture(scope="package")
def weights():
    """Those that all ranks together draw, before any step."""
    return resnet.new_model().state_dict()


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


@pytest.fixture(scope="package")
def expected(data, weights):
    """Mean loss and gradients of one process, by the number of micro-batches."""
    found = {}

    def step(micro):
        if micro not in found:
            found[micro] = one_process(torchvisions(weights), *data, micro)
        return found[micro]

    return step
