"""What goes into a model before it is sharded, and an optimizer of whole matrices."""

from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.optim import Muon
from torch.utils.checkpoint import checkpoint

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


def recompute(model: SmallTransformer) -> None:
    """Each block keeps its input only, and computes the rest again in backward."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


@torch.no_grad()
def muon_step(matrices: list[nn.Parameter]) -> None:
    """Gather each matrix and its gradient, step the whole one, and keep this rank's rows."""
    for matrix in matrices:
        whole = nn.Parameter(matrix.full_tensor())
        whole.grad = matrix.grad.full_tensor()
        Muon([whole], lr=0.1).step()
        mesh, placements = matrix.device_mesh, matrix.placements
        matrix.copy_(distribute_tensor(whole, mesh, placements, src_data_rank=None))
