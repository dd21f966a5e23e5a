"""Adapters, which go into a model before it is sharded."""

import torch
from torch import nn

from mgpu_tutorial.shared.models import SmallTransformer


class Adapted(nn.Module):
    """A frozen linear layer, and beside it a path through `rank` numbers that is trained."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False, dtype=layer.weight.dtype)
        self.up = nn.Linear(rank, layer.out_features, bias=False, dtype=layer.weight.dtype)
        nn.init.zeros_(self.up.weight)  # so that at first nothing changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def adapt(model: SmallTransformer, rank: int = 4) -> None:
    """Freeze everything, and give the queries and values of each block an adapter."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.attention.query = Adapted(block.attention.query, rank)
        block.attention.value = Adapted(block.attention.value, rank)
