"""Ways to train one model: on one process, in pieces, in slices, and three wrong ones."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from mgpu_tutorial.shared.models import SmallTransformer
from mgpu_tutorial.tensor_parallel.block import (
    parallelize,
    parallelize_with_sequence,
    sum_replicated_gradients,
)
from mgpu_tutorial.tensor_parallel.layers import Piece, joined, whole_of
from mgpu_tutorial.tensor_parallel.operators import Group
from mgpu_tutorial.tensor_parallel.vocabulary import parallel_cross_entropy

VOCABULARY = 61


class Trainable(NamedTuple):
    """A model, its loss of (logits, targets), and what to do between backward and step.

    Loss and backward run inside a `context()`.
    """

    model: nn.Module
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    after_backward: Callable[[], None] = lambda: None
    context: Callable[[], AbstractContextManager] = nullcontext


Way = Callable[[SmallTransformer], Trainable]


def whole(model: SmallTransformer) -> Trainable:
    """One process has everything; the reference."""
    return Trainable(model, flat_cross_entropy)


def in_pieces(model: SmallTransformer, **settings: object) -> Trainable:
    """Tensor parallel over all ranks, with settings of `parallelize`."""
    loss = partial(parallel_cross_entropy, vocabulary=model.head.out_features)
    return Trainable(parallelize(model, **settings), loss)


def in_slices(model: SmallTransformer) -> Trainable:
    """Tensor and sequence parallel over all ranks."""
    loss = partial(parallel_cross_entropy, vocabulary=model.head.out_features)
    parallelize_with_sequence(model)
    return Trainable(model, loss, partial(sum_replicated_gradients, model))


def flat_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """PyTorch's loss of logits (batch, sequence, vocabulary); in float32 at least."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(wide.flatten(0, 1), targets.flatten())


# Mistakes that leave no message: each is one line away from the right way


class NoOperator(torch.autograd.Function):
    """Wrong: no all-reduce in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def without_copy_to_ranks(model: SmallTransformer) -> Trainable:
    """Wrong: the operator at the beginning of the pieces is left out."""
    return in_pieces(model, enter=NoOperator)


def without_mask(model: SmallTransformer) -> Trainable:
    """Wrong: the padding of the vocabulary counts as tokens."""
    return in_pieces(model, mask=False)


def without_sum_of_replicated(model: SmallTransformer) -> Trainable:
    """Wrong: no sum of the replicated gradients (norms, biases, positions) over the ranks."""
    return in_slices(model)._replace(after_backward=lambda: None)


# The model, its batches and its training


def new_model(dtype: torch.dtype = torch.float32, **other: object) -> SmallTransformer:
    """Two blocks with twelve heads, 60,960 parameters, always the same."""
    torch.manual_seed(0)
    sizes = {"vocabulary": VOCABULARY, "width": 48, "heads": 12, "tied": False}
    return SmallTransformer(**(sizes | other)).to(dtype)


def new_batch(
    step: int, sequences: int = 4, length: int = 12, vocabulary: int = VOCABULARY
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the tokens that follow them, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(vocabulary, (sequences, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_and_gradients(trainable: Trainable, step: int = 0) -> torch.Tensor:
    """Forward and backward of a step's batch, without the optimizer; returns the loss."""
    tokens, targets = new_batch(step)
    with trainable.context():
        loss = trainable.loss(trainable.model(tokens), targets)
        loss.backward()
    trainable.after_backward()
    return as_whole(loss)


def train(
    rank: int, world_size: int, way: Way, steps: int = 5, **model: object
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with Adam; the loss of each step, and the whole parameters by name."""
    trainable = way(new_model(**model))
    optimizer = torch.optim.Adam(trainable.model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(loss_and_gradients(trainable, step).item())
        optimizer.step()
    return losses, whole_values(trainable.model)


def whole_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters by name, on every rank, whoever cut them."""
    return {name: as_whole(p) for name, p in model.named_parameters()}


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of the whole parameters by name, on every rank, whoever cut them."""
    return {
        name: joined(p.grad, p) if isinstance(p, Piece) else as_whole(p.grad)
        for name, p in model.named_parameters()
    }


def as_whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, of which this rank may have a part."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach()
    return whole_of(tensor)
