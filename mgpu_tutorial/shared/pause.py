"""A layer's computation replaced by waiting: it takes time, but no processor."""

import time
from typing import Any

import torch


class Pause(torch.autograd.Function):
    """`Pause.apply(x, forward, backward)` returns a copy of x after `forward` seconds.

    Its backward returns the gradient, unchanged, after `backward` seconds. So ranks that
    share cores wait side by side, as if each computed on a device of its own.
    """

    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, forward: float, backward: float
    ) -> torch.Tensor:
        context.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(context.seconds)
        return gradient, None, None
