"""torchvision works in the kernel and in ranks, whichever PyTorch it was built for."""

import torch

from mgpu_tutorial.shared.vision import torchvision


def test_a_network_runs_in_this_process():
    network = torchvision.models.mobilenet_v2(num_classes=10).eval()
    assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    image = torchvision.transforms.Resize(8)(torch.zeros(1, 4, 4))
    assert image.shape == (1, 8, 8)


def run_a_network(rank, world_size):
    network = torchvision.models.shufflenet_v2_x0_5(num_classes=10)
    return tuple(network(torch.zeros(2, 3, 32, 32)).shape)


def test_a_network_runs_in_ranks(ranks):
    assert ranks(2, run_a_network, device="cpu").results == [(2, 10)] * 2
