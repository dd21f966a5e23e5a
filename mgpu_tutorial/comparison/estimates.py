"""What one step of a network costs on any device, counted on PyTorch's device "meta", whose
tensors have shapes and no numbers."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from mgpu_tutorial.comparison.training import Experiment
from mgpu_tutorial.lab import Ledger
from mgpu_tutorial.shared.guards import whole
from mgpu_tutorial.shared.vision import torchvision

COUNTED = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear


class StepCost(NamedTuple):
    """Parameters, floating-point operations of a step, bytes that autograd keeps for it."""

    parameters: int
    operations: int
    saved: int


def count_operations(network: nn.Module, images: torch.Tensor) -> int:
    """The multiplications and additions of one step in convolutions and linear layers.

    Backward takes as many as forward for the gradient of a layer's weights, and as many again
    for that of its input, unless the input is an image, whose gradient nobody needs. Raises
    ValueError for a network with products of another kind.
    """
    counted, hooks = [], []
    refuse_what_is_not_counted(network)

    def count(layer: nn.Module, args: tuple, named: dict, output: torch.Tensor) -> None:
        require_grad(output)
        # each number that comes out is a sum over the weights of its channel
        forward = 2 * output.numel() * layer.weight[0].numel()
        (layer_input,) = [*args, *named.values()]
        counted.append(forward * (3 if layer_input.requires_grad else 2))

    for layer in network.modules():
        if isinstance(layer, COUNTED):
            hooks.append(layer.register_forward_hook(count, with_kwargs=True))
    plain = sdpa_kernel(SDPBackend.MATH)  # attention as products that are seen
    with plain, FlopCounterMode(display=False) as every, torch.enable_grad():
        network(images)
    for hook in hooks:
        hook.remove()
    refuse_other_products(every.get_flop_counts()["Global"])
    return sum(counted)


def require_grad(output: torch.Tensor) -> None:
    """ValueError for a layer that backward will not reach."""
    if not output.requires_grad:
        raise ValueError(
            "a layer works under no_grad, so it has no backward: count the network without it"
        )


def refuse_what_is_not_counted(network: nn.Module) -> None:
    """Raise ValueError for a frozen weight, and for one that is in no COUNTED layer."""
    layers = [layer for layer in network.modules() if isinstance(layer, COUNTED)]
    if not layers:
        raise ValueError("there is no convolution and no linear layer, so nothing to count")
    counted = {layer.weight for layer in layers}
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1 and parameter not in counted:
            raise ValueError(f"{name}: only convolutions and linear layers are counted")
        if not parameter.requires_grad:
            raise ValueError(f"{name} is frozen, and a step that trains all is counted")


def refuse_other_products(operations: Iterable[Any]) -> None:
    """Raise ValueError where an operation is no product with a weight, as in attention."""
    for operation in operations:
        if str(operation) not in ("aten.convolution", "aten.addmm", "aten.mm"):
            raise ValueError(
                f"{operation}: products of two activations are not counted here, only "
                "convolutions and linear layers"
            )


def count_step(experiment: Experiment) -> StepCost:
    """What one step on the whole global batch costs, on one device and in float32."""
    whole("batch", experiment.batch)
    whole("side", experiment.side)
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
    if gpus < 1 or min(rate, memory, bandwidth) <= 0:
        raise ValueError("give one GPU or more, and rates above zero")
    computing = step.operations / gpus / rate
    keeping = 2 * step.saved / gpus / memory
    sending = 2 * (gpus - 1) / gpus * 4 * step.parameters / bandwidth
    return max(computing, keeping, sending)
