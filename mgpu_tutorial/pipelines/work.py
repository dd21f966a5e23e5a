"""What flows through a pipeline: layers that pause, or the two halves of ResNet-50.

Every rank asks for the stage that it has: `module(index, count)` is stage `index` of
`count`, and `shape(index, count, micro)` that of its input for one of `micro` micro-batches
(of the result where `index` is `count`). `batch(micro)` has the inputs of the first stage
and the targets of the last, `loss` is the mean loss of a micro-batch.
"""

import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from mgpu_tutorial.model_parallel.split_resnet import cut
from mgpu_tutorial.shared.pause import Pause
from mgpu_tutorial.shared.vision import torchvision


@dataclass(frozen=True)
class Pauses:
    """Stages of a small layer that pause as long as a large one would compute.

    A rank pauses `forward` seconds in each forward of a micro-batch and twice as long in
    each backward; several stages share these. So ranks do not compete for cores, and only
    the schedule shows. With `is_split`, half of a backward is for the gradients of the
    weights, and a schedule may put it off.
    """

    ranks: int
    forward: float = 0.008
    is_split: bool = False
    loss = staticmethod(mse_loss)

    def module(self, index: int, count: int) -> nn.Module:
        torch.manual_seed(index)
        return PausingLayer(self.forward * self.ranks / count, self.is_split)

    def shape(self, index: int, count: int, micro: int) -> list[int]:
        return [16, 64]

    def batch(self, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        return torch.randn(16 * micro, 64), torch.zeros(16 * micro, 64)


class PausingLayer(nn.Linear):
    """A linear layer and a ReLU, and then a pause, in backward twice as long.

    PyTorch's stages call what `dw_builder()` returns for the weights' half of a backward.
    """

    def __init__(self, seconds: float, is_split: bool) -> None:
        super().__init__(64, 64)
        self.pauses = seconds, seconds if is_split else 2 * seconds
        self.dw_builder = (lambda: lambda: time.sleep(seconds)) if is_split else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Pause.apply(super().forward(x).relu(), *self.pauses)


class ResNetStages:
    """ResNet-50, cut before layer3, and four random images of 64 by 64 pixels.

    Weights and images are drawn on the CPU: the same for ranks on GPUs.
    """

    loss = staticmethod(cross_entropy)

    def module(self, index: int, count: int) -> nn.Module:
        torch.manual_seed(index)
        with torch.device("cpu"):
            stage = cut(torchvision.models.resnet50(), ["layer3.0"])[index]
        return stage.to(torch.get_default_device())

    def shape(self, index: int, count: int, micro: int) -> list[int]:
        return [4 // micro, *((3, 64, 64), (512, 8, 8), (1000,))[index]]

    def batch(self, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        with torch.device("cpu"):
            images, labels = torch.randn(4, 3, 64, 64), torch.randint(1000, (4,))
        return images.to(torch.get_default_device()), labels.to(torch.get_default_device())


Work = Pauses | ResNetStages
