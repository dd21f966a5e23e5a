"""Sequence parallel: what lies between the pieces works on slices of the sequence.

Norms and residual sums treat every token by itself, so each rank can do its share of the
tokens. The ranks gather the sequence where the pieces begin and scatter it where they end.
"""

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.shared.models import SmallTransformer
from mgpu_tutorial.tensor_parallel.block import parallelize
from mgpu_tutorial.tensor_parallel.copies import replicated
from mgpu_tutorial.tensor_parallel.operators import GatherSequence, Group, ScatterSequence


def parallelize_with_sequence(
    model: SmallTransformer, group: Group = None, mask: bool = True
) -> SmallTransformer:
    """As `parallelize`, and between the pieces every rank has a slice of the sequence.

    Each backward must be followed by `sum_replicated_gradients`. Raises ValueError on every
    rank as `parallelize` does, and in forward for a sequence that cannot be cut evenly.
    """
    parallelize(model, group, GatherSequence, ScatterSequence, mask)
    model.position = PositionsOfSlice(model.position, group)
    return model


class PositionsOfSlice(nn.Module):
    """The embeddings of the positions of this rank's slice; all ranks have the same table."""

    def __init__(self, whole: nn.Embedding, group: Group = None) -> None:
        super().__init__()
        self.weight, self.group = whole.weight, group

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        return nn.functional.embedding(places.chunk(ranks)[rank], self.weight)


def sum_replicated_gradients(model: nn.Module, group: Group = None) -> None:
    """Add up the gradients of what every rank has whole: each saw its own tokens only."""
    gradients = [p.grad for p in replicated(model).values() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    sums = flat.split([gradient.numel() for gradient in gradients])
    for gradient, total in zip(gradients, sums, strict=True):
        gradient.copy_(total.view_as(gradient))
