"""What one step of a network costs on any device, counted on PyTorch's device "meta", whose
tensors have shapes and no numbers."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.comparison.training import Experiment
from mgpu_tutorial.lab import Ledger
from mgpu_tutorial.shared.vision import torchvision


class StepCost(NamedTuple):
    """Parameters, floating-point operations of a step, bytes that autograd keeps for it."""

    parameters: int
    operations: int
    saved: int


def count_operations(network: nn.Module, images: torch.Tensor) -> int:
    """The multiplications and additions of one step in convolutions and linear layers.

    Backward takes as many as forward for the gradient of a layer's inputs, and as many again
    for that of its weights.
    """
    forward = []

    def count(layer: nn.Module, _: tuple, output: torch.Tensor) -> None:
        # each number that comes out is a sum over the weights of its channel
        forward.append(2 * output.numel() * layer.weight[0].numel())

    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(count)
    network(images)
    return 3 * sum(forward) - forward[0]  # nobody needs the gradient of the images


def count_step(experiment: Experiment) -> StepCost:
    """What one step on the whole global batch costs, on one device and in float32."""
    with torch.device("meta"):
        network = torchvision.models.get_model(experiment.network, num_classes=10)
        images = torch.empty(experiment.batch, 3, experiment.side, experiment.side)
        labels = torch.empty(experiment.batch, dtype=torch.int64)
    with Ledger().saved_for_backward(network) as ledger:
        _ = cross_entropy(network(images), labels)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    operations = count_operations(network, images)
    return StepCost(parameters, operations, ledger["meta"]["activations"])


def seconds_at_least(
    step: StepCost, gpus: int, rate: float, memory: float, bandwidth: float
) -> float:
    """Seconds of a step if its three parts overlap: the longest of them.

    `rate` is in operations a second, `memory` and `bandwidth` are in bytes a second.
    """
    computing = step.operations / gpus / rate
    keeping = 2 * step.saved / gpus / memory
    sending = 2 * (gpus - 1) / gpus * 4 * step.parameters / bandwidth
    return max(computing, keeping, sending)
