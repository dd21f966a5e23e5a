"""Mistakes that leave no message behind: each is one line away from the right way."""

from typing import Any

import torch

from mgpu_tutorial.shared.models import SmallTransformer
from mgpu_tutorial.tensor_parallel.operators import Group
from mgpu_tutorial.tensor_parallel.training import Prepared, in_pieces, in_slices


class NoOperator(torch.autograd.Function):
    """A mistake: the input goes into the pieces as it is, and its gradient comes out so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def without_copy_to_ranks(model: SmallTransformer) -> Prepared:
    """The operator at the beginning of the pieces is left out."""
    return in_pieces(model, enter=NoOperator)


def without_mask(model: SmallTransformer) -> Prepared:
    """The padding of the vocabulary counts as tokens."""
    return in_pieces(model, mask=False)


def without_sum_of_replicated(model: SmallTransformer) -> Prepared:
    """Sequence parallel, and nobody adds up the gradients of norms, biases and positions."""
    return in_slices(model)._replace(after_backward=lambda: None)
