"""What flows through a pipeline: layers that pause, or the two halves of ResNet-50."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from mgpu_tutorial.lab import span
from mgpu_tutorial.model_parallel.split_resnet import cut
from mgpu_tutorial.shared.vision import torchvision


@runtime_checkable
class Work(Protocol):
    """What a pipeline computes; every rank has one, and asks it for the stage that it has.

    Messages have PyTorch's default dtype, or that of an attribute `dtype`. With an attribute
    `stages`, the list of all modules, a parameter that two of them share is refused by name.
    """

    loss: Callable  # of an output and its targets: the mean

    def module(self, index: int) -> nn.Module:
        """The layers of stage `index`, of which the first must not work in place.

        No stage has a parameter of another, such as a head tied to an embedding: each rank
        would step a copy, by its own part of the gradient.
        """

    def shape(self, index: int, micro: int) -> list[int]:
        """That of the stage's input, for one of `micro` micro-batches."""

    def batch(self, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs of the first stage, and the targets of the last; alike on all ranks."""


def require_untied(stages: Sequence[nn.Module]) -> None:
    """ValueError that names a parameter of two stages: each would step a copy of it."""
    first: dict[nn.Parameter, int] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            other = first.setdefault(parameter, index)
            if other < index:
                raise ValueError(
                    f"`{name}` of stage {index} is in stage {other} too, perhaps tied: untie "
                    "it, or leave both layers to one stage"
                )


@dataclass(frozen=True)
class Pauses:
    """Stages of a small layer that pause as long as a large one would compute.

    A stage pauses `forward` seconds in the forward of a micro-batch and twice as long in its
    backward, and notes it for the chart. So ranks do not compete for cores, and only the
    schedule shows. With `is_split`, half of a backward is for the gradients of the weights,
    and a schedule may put it off.
    """

    forward: float = 0.008
    is_split: bool = False
    loss = staticmethod(mse_loss)

    def module(self, index: int) -> nn.Module:
        torch.manual_seed(index)
        module = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        forwards, weights = itertools.count(), itertools.count()
        kind, backward = ("I", self.forward) if self.is_split else ("B", 2 * self.forward)

        def pause(kind: str, i: int, seconds: float) -> None:
            with span(f"{kind} {index} {i}"):
                time.sleep(seconds)

        def pause_twice(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
            pause("F", i := next(forwards), self.forward)
            output.register_hook(lambda gradient: pause(kind, i, backward))

        module.register_forward_hook(pause_twice)
        if self.is_split:  # PyTorch's stages call what this returns for the weights
            module.dw_builder = lambda: partial(pause, "W", next(weights), self.forward)
        return module

    def shape(self, index: int, micro: int) -> list[int]:
        return [16, 64]

    def batch(self, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        return torch.randn(16 * micro, 64), torch.zeros(16 * micro, 64)


class ResNetStages:
    """ResNet-50, cut before layer3, and four random images of 64 by 64 pixels.

    Weights and images are drawn on the CPU: the same for ranks on GPUs.
    """

    loss = staticmethod(cross_entropy)

    def module(self, index: int) -> nn.Module:
        torch.manual_seed(index)
        with torch.device("cpu"):
            stage = cut(torchvision.models.resnet50(), ["layer3.0"])[index]
        return stage.to(torch.get_default_device())

    def shape(self, index: int, micro: int) -> list[int]:
        return [4 // micro, *((3, 64, 64), (512, 8, 8), (1000,))[index]]

    def batch(self, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        with torch.device("cpu"):
            batch = torch.randn(4, 3, 64, 64), torch.randint(1000, (4,))
        return tuple(part.to(torch.get_default_device()) for part in batch)
