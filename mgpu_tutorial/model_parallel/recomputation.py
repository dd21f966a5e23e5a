"""Recomputation: keep less for backward, and compute it again when it is needed."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mgpu_tutorial.model_parallel.resnet_cuts import units


def forward_in_groups(
    model: nn.Module, images: torch.Tensor, group_size: int
) -> torch.Tensor:
    """As `model(images)`, but of each group of units autograd keeps only what goes in.

    The backward pass makes the rest again, with a second forward of the group:
    https://docs.pytorch.org/docs/2.13/checkpoint.html.
    """
    parts = list(units(model).values())
    x = images
    for begin in range(0, len(parts), group_size):
        group = nn.Sequential(*parts[begin : begin + group_size])
        x = checkpoint(group, x, use_reentrant=False)
    return x
