"""ResNet-50 on several devices of one process: each has a part and hands on activations."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.model_parallel.micro_batches import split
from mgpu_tutorial.model_parallel.resnet_cuts import cut
from mgpu_tutorial.shared.vision import torchvision


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
        self.stages = cut(self, cuts, devices)  # a list, so parameters keep their names
        self.devices = [torch.device(device) for device in devices]
        for stage, device in zip(self.stages, self.devices, strict=True):
            stage.to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage, device in zip(self.stages, self.devices, strict=True):
            x = stage(x.to(device))
        return x


def unsplit_step(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, micro: int
) -> None:
    """The same step on one device: micro-batches one after the other, gradients add up."""
    for x, y in split(images, labels, micro):
        (cross_entropy(model(x), y) / micro).backward()
