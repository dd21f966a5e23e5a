"""torchvision works in the kernel and in ranks, whichever PyTorch it was built for."""

import torch

from mgpu_tutorial.lab import launch
from mgpu_tutorial.shared.vision import torchvision
from tests.lab import ranks


def test_a_network_runs_in_this_process():
    network = torchvision.models.mobilenet_v2(num_classes=10).eval()
    assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    image = torchvision.transforms.Resize(8)(torch.zeros(1, 4, 4))
    assert image.shape == (1, 8, 8)


def test_a_network_runs_in_ranks():
    assert launch(ranks.resnet, 2, device="cpu").results == [(1, 1000)] * 2
