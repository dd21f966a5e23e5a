"""The four opt levels of apex, O0 to O3, written with today's PyTorch.

apex is NVIDIA's extension that brought mixed precision before `torch.amp` did
(https://github.com/NVIDIA/apex). Here all levels use bfloat16, which needs no loss scaler.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import nll_loss

from mgpu_tutorial.distributed_sgd import new_model
from mgpu_tutorial.mixed_precision.precision import autocast, dtype_name, observe
from mgpu_tutorial.shared.data import digits


class Level(NamedTuple):
    """What the model's weights are stored in, what autocast computes in, and whether the
    optimizer steps on float32 copies of the weights. float32 means no autocast."""

    weights: torch.dtype
    autocast: torch.dtype
    master_weights: bool = False


LEVELS = {
    "O0": Level(weights=torch.float32, autocast=torch.float32),
    "O1": Level(weights=torch.float32, autocast=torch.bfloat16),
    "O2": Level(weights=torch.bfloat16, autocast=torch.float32, master_weights=True),
    "O3": Level(weights=torch.bfloat16, autocast=torch.float32),
}


class Trained(NamedTuple):
    """The dtypes that a training met, and its mean loss over 600 digits before and after."""

    weights: str
    conv1_returns: str
    gradients: str
    first_loss: float
    last_loss: float


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


def train_at_level(name: str, lr: float = 0.005, steps: int = 90) -> Trained:
    """Train on the digits, 100 a step, as the level "O0", "O1", "O2" or "O3" did.

    One process; nothing is communicated. ValueError for another name.
    """
    if name not in LEVELS:
        raise ValueError(f"level must be O0, O1, O2 or O3, got {name!r}")
    level = LEVELS[name]
    data = digits(dtype=level.weights)
    model, optimizer = new_model(lr=lr)
    model.to(level.weights)
    if level.master_weights:
        optimizer = MasterWeights(model, lr)

    def loss_of(index: slice) -> torch.Tensor:
        with autocast("cpu", level.autocast):
            output = model(data.images[index])
        return nll_loss(output.float(), data.labels[index])

    with torch.no_grad():
        first_loss = loss_of(slice(600)).item()
    for step in range(steps):
        start = step % 10 * 100  # ten batches, again and again
        model.zero_grad()
        loss_of(slice(start, start + 100)).backward()
        optimizer.step()
    with torch.no_grad(), autocast("cpu", level.autocast):
        outputs = observe(model, data.images[:1])
        last_loss = loss_of(slice(600)).item()
    return Trained(
        weights=dtype_name(model.conv1.weight.dtype),
        conv1_returns=outputs["conv1"],
        gradients=dtype_name(model.conv1.weight.grad.dtype),
        first_loss=first_loss,
        last_loss=last_loss,
    )
