"""ResNet-50 on several devices of one process: each has a part and hands on activations."""

from collections.abc import Container, Sequence

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab.simulate.devices import as_device, devices
from mgpu_tutorial.model_parallel.micro_batches import forward_backward, split
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


def new_model(seed: int = 0, own: Container[str] = UNITS) -> nn.Module:
    """torchvision's ResNet-50 with PyTorch's default weights, drawn unit by unit.

    Units that are not `own` stay on the meta device: they have shapes and no memory. So a
    rank makes its own stage only, and all ranks together make one model.
    """
    with torch.device("meta"):
        model = torchvision.models.resnet50()
    for i, (name, unit) in enumerate(units(model).items()):
        if name in own:
            unit.to_empty(device=torch.get_default_device())
            torch.manual_seed(100 * seed + i)
            for module in unit.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
    return model


def zero_model() -> nn.Module:
    """ResNet-50 with zeros: a step takes as long as with other numbers, and none is drawn."""
    model = new_model(own=()).to_empty(device=torch.get_default_device())
    for values in model.state_dict().values():
        values.zero_()
    return model


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients by name, of the parameters that have one, on the CPU."""
    named = model.named_parameters()
    return {name: p.grad.cpu() for name, p in named if p.grad is not None}


def random_images(batch: int = 4, image_size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """The same random images (N, 3, S, S) and labels (N,) on every rank."""
    draw = torch.Generator("cpu").manual_seed(1)
    images = torch.randn(batch, 3, image_size, image_size, generator=draw, device="cpu")
    labels = torch.randint(1000, (batch,), generator=draw, device="cpu")
    return images.to(torch.get_default_device()), labels.to(torch.get_default_device())


def unsplit_step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, micro: int):
    """The same step on one device: micro-batches one after the other, gradients add up."""
    for x, y in split(images, labels, micro):
        (cross_entropy(model(x), y) / micro).backward()


def step_on_two_devices(
    rank: int, world_size: int, micro: int = 1, image_size: int = 64
) -> float:
    """Each rank splits the same ResNet-50 over two devices of its own; returns the loss.

    The ranks send nothing to each other. Where there are no two GPUs, devices are virtual.
    """
    with torch.device("meta"):
        model = ModelParallelResNet50(devices(2))
    model.load_state_dict(new_model().state_dict())
    loss, _ = forward_backward(model, *random_images(image_size=image_size), micro)
    return loss
