"""What flows through a pipeline: layers that pause, or the parts of ResNet-50."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from mgpu_tutorial.model_parallel.resnet_cuts import cut, cut_units, stage_shapes
from mgpu_tutorial.model_parallel.split_resnet import new_resnet50, random_images
from mgpu_tutorial.shared.pause import Pause


class Work(Protocol):
    """Stages, data and loss. Every rank asks for the stage that it has."""

    def module(self, index: int, count: int) -> nn.Module:
        """Stage `index` of `count`."""

    def shape(self, index: int, count: int, micro: int) -> Sequence[int]:
        """The input's shape of stage `index` for one of `micro` micro-batches.

        At `index` = `count` it is the shape of the result.
        """

    def batch(self, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole batch: the inputs of the first stage, and the targets."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean loss of a micro-batch."""


@dataclass(frozen=True)
class Pauses:
    """Stages of a small layer that pause as long as a large one would compute.

    A rank pauses `forward` seconds in each forward of a micro-batch and twice as long in
    each backward; several stages share these. So ranks do not compete for cores, and only
    the schedule shows. With `split_backward` a schedule may take the gradients of input and
    weights apart. Micro-batches are (rows, width).
    """

    ranks: int
    forward: float = 0.008
    rows: int = 16
    width: int = 64
    split_backward: bool = False

    def module(self, index: int, count: int) -> nn.Module:
        torch.manual_seed(index)
        share = self.forward * self.ranks / count
        return PausingLayer(self.width, share, self.split_backward)

    def shape(self, index: int, count: int, micro: int) -> list[int]:
        return [self.rows, self.width]

    def batch(self, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        whole = (micro * self.rows, self.width)
        return torch.randn(whole), torch.zeros(whole)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse_loss(output, target)


class PausingLayer(nn.Module):
    """A linear layer and a ReLU, and then a pause; `dw_builder` pauses for the weights.

    PyTorch's stages call what `dw_builder()` returns where they make the weights' gradients.
    """

    def __init__(self, width: int, seconds: float, split_backward: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seconds = seconds
        self.backward_seconds = seconds if split_backward else 2 * seconds
        self.dw_builder: Callable[[], Callable[[], None]] | None = None
        if split_backward:
            self.dw_builder = lambda: lambda: time.sleep(seconds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Pause.apply(self.linear(x).relu(), self.seconds, self.backward_seconds)


@dataclass(frozen=True)
class ResNetStages:
    """ResNet-50, cut before the units in `cuts`: `model`, or each rank makes its own part.

    For half as many stages every second cut is taken. Images are (samples, 3, S, S).
    """

    cuts: Sequence[str] = ("layer3.0",)
    samples: int = 4
    image_size: int = 64
    model: nn.Module | None = None

    def module(self, index: int, count: int) -> nn.Module:
        cuts = self.cuts_for(count)
        model = self.model or new_resnet50(own=cut_units(cuts)[index])
        return cut(model, cuts)[index]

    def shape(self, index: int, count: int, micro: int) -> list[int]:
        shapes = stage_shapes(self.cuts_for(count), self.samples // micro, self.image_size)
        return shapes[index]

    def cuts_for(self, count: int) -> Sequence[str]:
        """The cuts that make `count` stages; ValueError where there are none."""
        each, rest = divmod(len(self.cuts) + 1, count)
        if rest:
            raise ValueError(f"{list(self.cuts)} cannot be joined to {count} stages")
        return self.cuts[each - 1 :: each]

    def batch(self, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        return random_images(self.samples, self.image_size)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output, target)
