"""Model parallel: each device has a part of ResNet-50 and hands activations to the next one.

First in one process, with `.to(device)` in between; then micro-batches that keep all devices
busy; then across processes, where the part on rank r sends to the one on rank r + 1.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab import span
from mgpu_tutorial.lab.simulate.devices import as_device
from mgpu_tutorial.model_parallel.micro_batches import split
from mgpu_tutorial.model_parallel.resnet_cuts import (
    BLOCKS,
    UNITS,
    check_cuts,
    cut,
    cut_units,
    stage_shapes,
    units,
)
from mgpu_tutorial.shared.vision import torchvision


class ModelParallelResNet50(torchvision.models.ResNet):
    """Stage s computes on devices[s] and hands its activations to the device of stage s + 1.

    The parameters have torchvision's names, so that a state_dict goes both ways. `cuts`
    names the unit that begins each further stage. Under `torch.device("meta")` the stages get
    memory on their devices and no weights yet: load a state_dict. Takes images (N, 3, H, W)
    on any device; returns (N, num_classes) on the last. Raises ValueError for fewer than two
    devices, a unit that ResNet-50 does not have, and units in another order than its own.
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


# Across processes, with send and recv


def receive(shape: Sequence[int], source: int, dtype: torch.dtype = torch.float32):
    """A tensor of this shape from rank `source`."""
    buffer = torch.empty(*shape, dtype=dtype)
    dist.recv(buffer, source)
    return buffer


def agree_on_shapes(rank: int, cuts: Sequence[str], batch: int, image_size: int) -> list[int]:
    """Rank r tells r + 1 the shape that it will send: gloo itself compares nothing.

    Returns the shape that goes into this rank's stage. Raises ValueError where the rank
    before will send another, and for cuts that do not make a stage for each rank.
    """
    check_cuts(cuts, [f"rank {r}" for r in range(dist.get_world_size())])
    comes, goes = stage_shapes(cuts, batch, image_size)[rank : rank + 2]
    if rank < len(cuts):
        dist.send(torch.tensor([*goes, 0, 0][:4]), rank + 1)  # four numbers in any case
    if rank > 0:
        told = [n for n in receive([4], rank - 1, torch.int64).tolist() if n]
        if told != comes:
            raise ValueError(
                f"stage {rank - 1} sends {told}, and stage {rank} expects {comes}: "
                "give every rank the same cuts, batch and image size"
            )
    return comes


def forward_one(
    stage: nn.Module, images: torch.Tensor, shape: Sequence[int], i: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The input comes from rank - 1, or is the images; the output goes to rank + 1."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    input_tensor = images
    if rank > 0:  # a new leaf: its gradient is what rank - 1 waits for
        input_tensor = receive(shape, rank - 1).requires_grad_()
    with span(f"F {rank} {i}"):
        output_tensor = stage(input_tensor)
    if rank < last:
        dist.send(output_tensor.detach(), rank + 1)
    return input_tensor, output_tensor


def backward_one(input_tensor: torch.Tensor, output_tensor: torch.Tensor, i: int) -> None:
    """The output's gradient comes from rank + 1, the input's goes to rank - 1."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    output_tensor_grad = None  # on the last rank the output is the loss
    if rank < last:
        output_tensor_grad = receive(output_tensor.shape, rank + 1)
    with span(f"B {rank} {i}"):
        output_tensor.backward(output_tensor_grad)
    if rank > 0:
        dist.send(input_tensor.grad, rank - 1)


def run_stages(
    rank: int,
    world_size: int,
    cuts: Sequence[str] = ("layer3.0",),
    micro: int = 1,
    batch: int = 4,
    image_size: int = 64,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Activations go to rank + 1, gradients to rank - 1; returns losses and own gradients."""
    parts = split(*random_images(batch, image_size), micro)
    shape = agree_on_shapes(rank, cuts, batch // micro, image_size)
    model = new_model(own=cut_units(cuts)[rank])
    stage = cut(model, cuts)[rank]
    saved, losses = [], []
    # all forwards: what a backward needs is saved until then
    for i, (images, labels) in enumerate(parts):
        input_tensor, output_tensor = forward_one(stage, images, shape, i)
        if rank == world_size - 1:
            output_tensor = cross_entropy(output_tensor, labels) / micro
            losses.append(output_tensor.item())
        saved.append((input_tensor, output_tensor))
    # all backwards: the gradients of the parameters add up
    for i, (input_tensor, output_tensor) in enumerate(saved):
        backward_one(input_tensor, output_tensor, i)
    return losses, gradients(model)


def run_stages_cut_differently(rank: int, world_size: int) -> None:
    """Rank 0 cuts before layer3, rank 1 before layer4: they disagree on what is sent."""
    run_stages(rank, world_size, cuts=[("layer3.0",), ("layer4.0",)][rank])


# Across processes, with torch.distributed.pipelining


@dataclass(frozen=True)
class ResNetStages:
    """ResNet-50 as work for `pipeline.run_schedule`: one part of `model` for each stage.

    `cuts` are made where there are as many stages; for half as many, every second one.
    """

    model: nn.Module
    cuts: Sequence[str] = ("layer2.0", "layer3.0", "layer4.0")
    samples: int = 4
    image_size: int = 64

    def batch(self, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        return random_images(self.samples, self.image_size)

    def stage(self, index: int, count: int, micro: int) -> PipelineStage:
        each, rest = divmod(len(self.cuts) + 1, count)
        if rest:
            raise ValueError(f"{list(self.cuts)} cannot be joined to {count} stages")
        cuts = self.cuts[each - 1 :: each]
        shapes = stage_shapes(cuts, self.samples // micro, self.image_size)
        goes_in, comes_out = (torch.empty(*shape) for shape in shapes[index : index + 2])
        return PipelineStage(
            cut(self.model, cuts)[index],
            index,
            count,
            goes_in.device,
            input_args=goes_in.requires_grad_(index > 0),  # else PyTorch would find out the
            output_args=comes_out.requires_grad_(),  # shapes with a forward of its own
        )

    def loss(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output, labels)


def unsplit_step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, micro: int):
    """The same step on one device: micro-batches one after the other, gradients add up."""
    for x, y in split(images, labels, micro):
        (cross_entropy(model(x), y) / micro).backward()
