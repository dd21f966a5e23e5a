"""The norm of a gradient of which each rank has parts."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    groups: Sequence[dist.ProcessGroup | None] = (),
) -> torch.Tensor:
    """Clip as torch's `clip_grad_norm_`, where some tensors are parts; returns the norm.

    The squares of a part, which has a `group`, are added up over that group: shards of ZeRO
    3, parts of tensor-parallel layers. In `groups` each rank has other parameters: stages of
    a pipeline, owners of ZeRO 1. A group of None is all ranks. Gradients are means by then.
    """
    parameters = list(parameters)
    device = parameters[0].device if parameters else None
    squares = {"whole": torch.zeros((), dtype=torch.float64, device=device)}
    for p in parameters:
        group = getattr(p, "group", "whole")
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        own = gradient.square().sum(dtype=torch.float64)
        squares[group] = squares.get(group, 0) + own.to(device)
    for group, part in squares.items():
        if group != "whole":
            dist.all_reduce(part, group=group)
    total = sum(squares.values())
    for group in groups:
        dist.all_reduce(total, group=group)
    norm = total.sqrt()
    for p in parameters:
        if p.grad is not None:
            p.grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return norm
