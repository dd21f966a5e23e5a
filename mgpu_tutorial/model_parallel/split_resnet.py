"""ResNet-50 on several devices of one process: each has a part and hands on activations."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from mgpu_tutorial.shared.vision import torchvision

UNITS = (
    *("conv1", "maxpool"),
    *(f"layer{i}.{j}" for i, blocks in enumerate([3, 4, 6, 3], 1) for j in range(blocks)),
    *("avgpool", "fc"),
)


def units(model: nn.Module) -> dict[str, nn.Module]:
    """The parts between which ResNet-50 can be cut, in the order of its forward.

    Inside a residual block a cut would have to send two tensors, so a block is one unit.
    """
    modules = [nn.Sequential(model.conv1, model.bn1, model.relu), model.maxpool]
    modules += [*model.layer1, *model.layer2, *model.layer3, *model.layer4]
    modules += [nn.Sequential(model.avgpool, nn.Flatten(1)), model.fc]
    return dict(zip(UNITS, modules, strict=True))


def cut_units(cuts: Sequence[str]) -> list[tuple[str, ...]]:
    """The names of the units of each stage; ValueError where `cuts` are none in order."""
    places = [UNITS.index(name) for name in cuts if name in UNITS[1:]]
    if len(places) < len(cuts) or places != sorted(set(places)):
        known = ", ".join(UNITS[1:])
        raise ValueError(f"cuts must be some of {known}, in this order; got {cuts!r}")
    return [UNITS[begin:end] for begin, end in pairwise([0, *places, len(UNITS)])]


def cut(model: nn.Module, cuts: Sequence[str]) -> list[nn.Sequential]:
    """The stages of ResNet-50: a new one begins at each unit in `cuts`."""
    modules = units(model)
    return [nn.Sequential(*map(modules.get, names)) for names in cut_units(cuts)]


class ModelParallelResNet50(torchvision.models.ResNet):
    """Stage s computes on devices[s] and hands its activations to the next device.

    A stage begins at each unit in `cuts`. Images (N, 3, H, W) come in, and what comes out,
    (N, num_classes), lies on the last device.
    """

    def __init__(
        self,
        devices: Sequence[torch.device | str],
        num_classes: int = 1000,
        cuts: Sequence[str] = ("layer3.0",),
    ) -> None:
        block = torchvision.models.resnet.Bottleneck
        super().__init__(block, [3, 4, 6, 3], num_classes=num_classes)
        self.stages = cut(self, cuts)  # a list, so parameters keep their names
        self.devices = [torch.device(device) for device in devices]
        for stage, device in zip(self.stages, self.devices, strict=True):
            stage.to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage, device in zip(self.stages, self.devices, strict=True):
            x = stage(x.to(device))
        return x
