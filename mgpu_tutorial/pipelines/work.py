"""What flows through a pipeline: layers that pause, or the parts of ResNet-50.

Every rank asks for the stage that it has: `module(index, count)` is stage `index` of
`count`, and `shape(index, count, micro)` that of its input for one of `micro` micro-batches
(of the result where `index` is `count`). `batch(micro)` has the inputs of the first stage
and the targets of the last, `loss` is the mean loss of a micro-batch.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from mgpu_tutorial.model_parallel.resnet_cuts import cut
from mgpu_tutorial.shared.pause import Pause
from mgpu_tutorial.shared.vision import torchvision


@dataclass(frozen=True)
class Pauses:
    """Stages of a small layer that pause as long as a large one would compute.

    A rank pauses `forward` seconds in each forward of a micro-batch and twice as long in
    each backward; several stages share these. So ranks do not compete for cores, and only
    the schedule shows. With `is_split`, half of a backward is for the gradients of the
    weights, and a schedule may put it off. Micro-batches are (rows, width).
    """

    ranks: int
    forward: float = 0.008
    rows: int = 16
    width: int = 64
    is_split: bool = False
    loss = staticmethod(mse_loss)

    def module(self, index: int, count: int) -> nn.Module:
        torch.manual_seed(index)
        return PausingLayer(self.width, self.forward * self.ranks / count, self.is_split)

    def shape(self, index: int, count: int, micro: int) -> list[int]:
        return [self.rows, self.width]

    def batch(self, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        whole = (micro * self.rows, self.width)
        return torch.randn(whole), torch.zeros(whole)


class PausingLayer(nn.Module):
    """A linear layer and a ReLU, and then a pause, in backward twice as long.

    PyTorch's stages call what `dw_builder()` returns for the weights' half of a backward.
    """

    dw_builder: Callable[[], Callable[[], None]] | None = None

    def __init__(self, width: int, seconds: float, is_split: bool) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width), seconds
        self.backward_seconds = seconds if is_split else 2 * seconds
        if is_split:
            self.dw_builder = lambda: lambda: time.sleep(seconds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Pause.apply(self.linear(x).relu(), self.seconds, self.backward_seconds)


@dataclass(frozen=True)
class ResNetStages:
    """ResNet-50, cut before the units in `cuts`, and random images (samples, 3, S, S)."""

    cuts: Sequence[str] = ("layer3.0",)
    samples: int = 4
    image_size: int = 64
    loss = staticmethod(cross_entropy)

    def module(self, index: int, count: int) -> nn.Module:
        """Only this stage gets memory: the network is made on the meta device."""
        with torch.device("meta"):
            stage = cut(torchvision.models.resnet50(), self.cuts, range(count))[index]
        stage.to_empty(device=torch.get_default_device())
        torch.manual_seed(index)
        for module in stage.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return stage

    def shape(self, index: int, count: int, micro: int) -> list[int]:
        with torch.device("meta"), torch.no_grad():
            x = torch.empty(self.samples // micro, 3, self.image_size, self.image_size)
            model = torchvision.models.resnet50(norm_layer=nn.Identity)  # it keeps shapes too
            for stage in cut(model, self.cuts, range(count))[:index]:
                x = stage(x)
        return list(x.shape)

    def batch(self, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same images and labels on every rank, whatever its device."""
        draw, device = torch.Generator("cpu").manual_seed(1), torch.get_default_device()
        sides = self.samples, 3, self.image_size, self.image_size
        images = torch.randn(sides, generator=draw, device="cpu")
        labels = torch.randint(1000, (self.samples,), generator=draw, device="cpu")
        return images.to(device), labels.to(device)


Work = Pauses | ResNetStages
