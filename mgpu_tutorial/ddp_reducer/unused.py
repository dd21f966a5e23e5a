"""Parameters that a forward pass leaves out, on all ranks or on one, and what helps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(nn.Module):
    """Two heads; a forward uses the first, and `second` times the second if that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 1)
        self.second = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, second: float | None = None) -> torch.Tensor:
        output = self.first(x)
        if second is not None:
            output = output + second * self.second(x)
        return output


def train_two_heads(
    rank: int, world_size: int, second: Sequence[float | None], steps: int = 2, **options: Any
) -> list[float | None]:
    """The ranks train DDP(TwoHeads(), **options); rank r gives `second[r]` to its forward.

    Returns the gradient of each head's bias. The first head's is 2 on rank 0 and 4 on
    rank 1, before they are averaged.
    """
    model = DistributedDataParallel(TwoHeads(), **options)
    biases = [model.module.first.bias, model.module.second.bias]
    for step in range(steps):
        model.zero_grad()
        output = model(torch.ones(2, 4), second[rank])
        print(f"forward {step} done")
        (output.sum() * (1 + rank)).backward()
        print(f"backward {step} done: gradient {biases[0].grad.item()}")
    return [None if bias.grad is None else bias.grad.item() for bias in biases]
