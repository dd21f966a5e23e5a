"""The four opt levels of apex, O0 to O3, written with today's PyTorch.

apex is NVIDIA's extension that brought mixed precision before `torch.amp` did
(https://github.com/NVIDIA/apex). Here all levels use bfloat16, which needs no loss scaler.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import nll_loss

from mgpu_tutorial.distributed_sgd.sgd import new_model
from mgpu_tutorial.shared.data import digits


class MasterWeights:
    """SGD on float32 copies of a model in 16 bits, which then gets them rounded (O2)."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.low = list(model.parameters())
        self.master = [p.detach().float() for p in self.low]
        self.optimizer = torch.optim.SGD(self.master, lr=lr, momentum=0.5)

    def step(self) -> None:
        for master, low in zip(self.master, self.low, strict=True):
            master.grad = low.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for master, low in zip(self.master, self.low, strict=True):
                low.copy_(master)


class Level(NamedTuple):
    """The dtype of the stored weights, that of products, and its name in today's PyTorch.

    With `master_weights` the optimizer steps on float32 copies of the weights.
    """

    weights: torch.dtype
    products: torch.dtype
    master_weights: bool
    today: str


LEVELS = {
    "O0": Level(torch.float32, torch.float32, False, "float32"),
    "O1": Level(torch.float32, torch.bfloat16, False, "torch.autocast"),
    "O2": Level(torch.bfloat16, torch.bfloat16, True, "MixedPrecisionPolicy of FSDP2"),
    "O3": Level(torch.bfloat16, torch.bfloat16, False, "model.bfloat16()"),
}


def train_at_level(level: Level, lr: float = 0.01, steps: int = 103) -> tuple[float, float]:
    """Train on one process, 30 digits a step; returns the loss of 600 before and after."""
    data = digits(dtype=level.weights)
    model, optimizer = new_model(lr=lr)
    model.to(level.weights)
    if level.master_weights:
        optimizer = MasterWeights(model, lr)

    def loss_of(index: slice) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, level.products != level.weights):
            output = model(data.images[index])
        return nll_loss(output.float(), data.labels[index])

    first = loss_of(slice(600)).item()
    for step in range(steps):
        start = step % 20 * 30  # twenty batches, again and again
        model.zero_grad()
        loss_of(slice(start, start + 30)).backward()
        optimizer.step()
    return first, loss_of(slice(600)).item()
