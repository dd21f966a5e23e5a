"""Recomputation keeps less and computes the same, but BatchNorm sees the images twice."""

import copy

import pytest
import torch

from mgpu_tutorial.model_parallel.recomputation import forward_in_groups
from mgpu_tutorial.shared.vision import torchvision
from tests.model_parallel.reference import gradients_of, one_process


@pytest.mark.parametrize("group_size", [1, 3, 7, 20, 50])
def test_gradients_are_the_same_bits_and_the_running_mean_moves_twice(group_size):
    """As many units as ResNet-50, and a sixteenth of the channels inside a block."""
    images, labels = torch.randn(2, 3, 33, 33), torch.arange(2)
    model = torchvision.models.resnet50(num_classes=10, width_per_group=4)
    _, gradients = one_process(copy.deepcopy(model), images, labels, 1)
    start, calls = model.bn1.running_mean.clone(), []
    for block in (model.conv1, model.layer2[0].conv1, model.fc):
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    output = forward_in_groups(model, images, group_size)
    torch.nn.functional.cross_entropy(output, labels).backward()
    torch.testing.assert_close(gradients_of(model), gradients, rtol=0, atol=0)
    assert len(calls) == 6 and int(model.bn1.num_batches_tracked) == 2
    mean = model.conv1(images).mean((0, 2, 3)).detach()
    torch.testing.assert_close(model.bn1.running_mean, 0.81 * start + 0.19 * mean)
