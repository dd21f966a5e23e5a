"""ResNet-50 on several devices of one process: each has a part and hands on activations."""

from collections.abc import Container, Sequence

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from mgpu_tutorial.lab.simulate.devices import as_device
from mgpu_tutorial.model_parallel.micro_batches import split
from mgpu_tutorial.model_parallel.resnet_cuts import BLOCKS, UNITS, check_cuts, cut, units
from mgpu_tutorial.shared.vision import torchvision


class ModelParallelResNet50(torchvision.models.ResNet):
    """Stage s computes on devices[s] and hands its activations to the device of stage s + 1.

    A stage begins at each unit in `cuts`. Made under `torch.device("meta")`, the stages get
    memory and no weights yet. Takes images (N, 3, H, W), returns (N, num_classes) on the
    last device. Raises ValueError for fewer than two devices and units out of order.
    """

    def __init__(
        self,
        devices: Sequence[torch.device | str],
        num_classes: int = 1000,
        cuts: Sequence[str] = ("layer3.0",),
    ) -> None:
        check_cuts(cuts, devices)
        block = torchvision.models.resnet.Bottleneck
        super().__init__(block, BLOCKS, num_classes=num_classes)
        self.devices = [as_device(device) for device in devices]
        self.stages = cut(self, cuts)  # a list, so the parameters keep their names
        no_memory = self.fc.weight.is_meta
        for stage, device in zip(self.stages, self.devices, strict=True):
            (stage.to_empty if no_memory else stage.to)(device=device)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images
        for stage, device in zip(self.stages, self.devices, strict=True):
            x = stage(x.to(device))
        return x


def new_resnet50(own: Container[str] = UNITS) -> nn.Module:
    """torchvision's ResNet-50 with PyTorch's default weights, drawn unit by unit.

    Units that are not in `own` stay on the meta device, where they need no memory. So each
    rank makes the weights of its own stage, and all ranks together have one model.
    """
    with torch.device("meta"):
        model = torchvision.models.resnet50()
    for i, (name, unit) in enumerate(units(model).items()):
        if name in own:
            unit.to_empty(device=torch.get_default_device())
            torch.manual_seed(i)
            for module in unit.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
    return model


def random_images(batch: int = 4, image_size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """The same random images (N, 3, S, S) and labels (N,) on every rank."""
    draw = torch.Generator("cpu").manual_seed(1)
    images = torch.randn(batch, 3, image_size, image_size, generator=draw, device="cpu")
    labels = torch.randint(1000, (batch,), generator=draw, device="cpu")
    return images.to(torch.get_default_device()), labels.to(torch.get_default_device())


def unsplit_step(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, micro: int
) -> None:
    """The same step on one device: micro-batches one after the other, gradients add up."""
    for x, y in split(images, labels, micro):
        (cross_entropy(model(x), y) / micro).backward()


# Recomputation: keep less for backward, and compute it again when it is needed


def forward_in_groups(
    model: nn.Module, images: torch.Tensor, group_size: int
) -> torch.Tensor:
    """As `model(images)`, but of each group of units autograd keeps only what goes in.

    The backward pass makes the rest again, with a second forward of the group:
    https://docs.pytorch.org/docs/2.13/checkpoint.html.
    """
    parts = list(units(model).values())
    x = images
    for begin in range(0, len(parts), group_size):
        group = nn.Sequential(*parts[begin : begin + group_size])
        x = checkpoint(group, x, use_reentrant=False)
    return x
