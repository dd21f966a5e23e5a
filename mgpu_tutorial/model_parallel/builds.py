"""What the split ResNet-50 must do."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab.devices import devices
from mgpu_tutorial.lab.teach.build import Builder, expect
from mgpu_tutorial.model_parallel.split_resnet import ModelParallelResNet50, split, units
from mgpu_tutorial.shared.vision import torchvision

CUTS = ["layer1.0", "layer3.0", "fc"]

# ModelParallelResNet50


def _split(model_class: Callable) -> nn.Module:
    """Four stages of ten classes. They are not kept: with gradients they take 0.4 GB."""
    return model_class(devices(4), num_classes=10, cuts=CUTS).double()


def has_stages_on_devices(model_class: Callable) -> None:
    """keep each stage on its device, and nothing of it elsewhere"""
    stages = split(units(_split(model_class)), CUTS)
    for device, stage in zip(devices(4), stages, strict=True):
        for name, unit in stage.items():
            for key, tensor in unit.state_dict().items():
                expect(str(tensor.device), str(device), f"the device of {name}'s {key}")


def refuses_other_numbers_of_devices(model_class: Callable) -> None:
    """raise an error if there are not as many devices as stages, one more or one less"""
    for count in 1, 3:
        try:
            with torch.device("meta") as meta:  # draws no weights, computes nothing
                model_class([meta] * count, num_classes=10)(torch.empty(1, 3, 40, 40))
        except (ValueError, IndexError) as error:
            del error
        else:
            raise AssertionError(f"2 stages and {count} device(s): no error")


def computes_as_one_network(model_class: Callable) -> None:
    """give the whole network's output on the last device, and leave all 161 gradients"""
    network = _split(model_class)
    whole = torchvision.models.resnet50(num_classes=10).double()
    names = (sorted(model.state_dict()) for model in (network, whole))
    expect(*names, "the names in the state_dict")
    network.load_state_dict(whole.state_dict())
    images = torch.randn(2, 3, 40, 40, dtype=torch.float64)
    output, wanted = network(images.to(devices(4)[0])), whole(images)
    expect(str(output.device), str(devices(4)[-1]), "the device of the output")
    expect(output.detach().cpu(), wanted.detach(), "the output", within=1e-9)
    for model in network, whole:
        model.zero_grad()
    for logits in output, wanted:
        cross_entropy(logits.cpu(), torch.arange(2)).backward()
    for name, parameter in whole.named_parameters():
        found, one = network.get_parameter(name).grad, parameter.grad
        assert found is not None, f"the gradient of {name}: there is none"
        expect(found.cpu(), one, f"the gradient of {name}", 1e-9 * one.abs().max().item())


build = Builder(
    "model_parallel",
    {
        ModelParallelResNet50: [
            has_stages_on_devices,
            computes_as_one_network,
            refuses_other_numbers_of_devices,
        ]
    },
)
