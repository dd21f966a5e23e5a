"""Parameters that a forward pass leaves out, on all ranks or on one, and what helps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.experiments import trace_steps
from mgpu_tutorial.ddp_buckets.wrappers import calling_from_python
from mgpu_tutorial.lab import slow_link
from mgpu_tutorial.shared.pause import Pause


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


class UpsideDown(nn.Module):
    """Six layers of 256 KiB, of which the first defined is the last used, or the first.

    The backward of each takes `pause` seconds more, without using the processor.
    """

    def __init__(self, pause: float, in_order: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(6))
        self.pause = pause
        self.in_order = in_order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers if self.in_order else reversed(self.layers):
            x = Pause.apply(layer(x), 0.0, self.pause)
        return x


def train_upside_down(
    rank: int, world_size: int, in_order: bool = False, seconds: float = 15e-3, **options: Any
) -> None:
    """The ranks take eight steps; each layer's bucket takes `seconds` on a slow network."""
    layers = UpsideDown(pause=15e-3, in_order=in_order)
    model = DistributedDataParallel(layers, bucket_cap_mb=0.25, **options)
    model = calling_from_python(model)  # where the trace and the slow link see its calls
    with slow_link(lambda nbytes: seconds):
        trace_steps(model, torch.randn(4, 256), steps=8)
