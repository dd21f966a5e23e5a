"""Three levels of short numbers in one training: none, the products, the weights too.

NVIDIA's extension apex called them O0, O1 and O3 (https://github.com/NVIDIA/apex). Here they
use bfloat16, which needs no loss scaler.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import nll_loss

from mgpu_tutorial.distributed_sgd.sgd import new_model
from mgpu_tutorial.shared.data import digits


class Level(NamedTuple):
    """The dtype of the stored weights, and that of products."""

    weights: torch.dtype
    products: torch.dtype


LEVELS = {
    "float32": Level(torch.float32, torch.float32),
    "torch.autocast": Level(torch.float32, torch.bfloat16),
    "model.bfloat16()": Level(torch.bfloat16, torch.bfloat16),
}


def train_at_level(level: Level, lr: float = 0.01, steps: int = 103) -> tuple[float, float]:
    """Train on one process, 30 digits a step; returns the loss of 600 before and after."""
    data = digits(dtype=level.weights)
    model, optimizer = new_model(lr=lr)
    model.to(level.weights)

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
