"""ResNet-50 on several devices of one process: each has a part and hands on activations."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mgpu_tutorial.shared.vision import torchvision


def units(model: nn.Module) -> dict[str, nn.Module]:
    """The parts between which ResNet-50 can be cut, in the order of its forward.

    Inside a residual block a cut would have to send two tensors, so a block is one unit.
    """
    row = {
        "conv1": nn.Sequential(model.conv1, model.bn1, model.relu),
        "maxpool": model.maxpool,
    }
    for layer in ("layer1", "layer2", "layer3", "layer4"):
        for name, block in getattr(model, layer).named_children():
            row[f"{layer}.{name}"] = block
    return row | {"avgpool": nn.Sequential(model.avgpool, nn.Flatten(1)), "fc": model.fc}


def split(row: Mapping[str, Any], cuts: Sequence[str]) -> list[dict[str, Any]]:
    """A row of units in stages: a new one begins at each unit that `cuts` names."""
    if unknown := set(cuts) - row.keys():
        raise ValueError(f"cuts are at {', '.join(row)}, got {unknown}")
    stages: list[dict[str, Any]] = [{}]
    for name, unit in row.items():
        if name in cuts:
            stages.append({})
        stages[-1][name] = unit
    return stages


def cut(model: nn.Module, cuts: Sequence[str]) -> list[nn.Sequential]:
    """The stages of ResNet-50."""
    return [nn.Sequential(*stage.values()) for stage in split(units(model), cuts)]


class ModelParallelResNet50(torchvision.models.ResNet):
    """Stage s computes on devices[s] and hands its activations to the next device.

    A stage begins at each unit in `cuts`. Images (N, 3, H, W) come in, and what comes out,
    (N, num_classes), lies on the last device.
    """

    def __init__(
        self, devices: Sequence, num_classes: int = 1000, cuts: Sequence = ("layer3.0",)
    ) -> None:
        block = torchvision.models.resnet.Bottleneck
        super().__init__(block, [3, 4, 6, 3], num_classes=num_classes)
        self.stages = cut(self, cuts)  # a list, so parameters keep their names
        self.devices = devices
        for stage, device in zip(self.stages, self.devices, strict=True):
            stage.to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage, device in zip(self.stages, self.devices, strict=True):
            x = stage(x.to(device))
        return x
