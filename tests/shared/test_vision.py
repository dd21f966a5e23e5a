"""torchvision works in ranks, whichever PyTorch it was built for."""

import torch

from mgpu_tutorial.shared.vision import torchvision


def run_a_network(rank, world_size):
    network = torchvision.models.shufflenet_v2_x0_5(num_classes=10)
    return tuple(network(torch.zeros(2, 3, 32, 32)).shape)


def test_a_network_runs_in_ranks(ranks):
    assert ranks(2, run_a_network, device="cpu").results == [(2, 10)] * 2
