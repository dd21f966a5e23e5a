"""One step for all ways: whole on one process, in pieces, with slices of the sequence."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from mgpu_tutorial.shared.models import SmallTransformer
from mgpu_tutorial.tensor_parallel.block import parallelize
from mgpu_tutorial.tensor_parallel.layers import Piece, joined, whole_of
from mgpu_tutorial.tensor_parallel.sequence import (
    parallelize_with_sequence,
    sum_replicated_gradients,
)
from mgpu_tutorial.tensor_parallel.vocabulary import parallel_cross_entropy

VOCABULARY = 61


class Prepared(NamedTuple):
    """A model, its loss of (logits, targets), and what to do between backward and step.

    Loss and backward run inside a `context()`.
    """

    model: nn.Module
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    after_backward: Callable[[], None] = lambda: None
    context: Callable[[], AbstractContextManager] = nullcontext


Way = Callable[[SmallTransformer], Prepared]


def whole(model: SmallTransformer) -> Prepared:
    """One process has everything; the reference."""
    return Prepared(model, flat_cross_entropy)


def in_pieces(model: SmallTransformer, **settings: object) -> Prepared:
    """Tensor parallel over all ranks, with settings of `parallelize`."""
    loss = partial(parallel_cross_entropy, vocabulary=model.head.out_features)
    return Prepared(parallelize(model, **settings), loss)


def in_slices(model: SmallTransformer) -> Prepared:
    """Tensor and sequence parallel over all ranks."""
    loss = partial(parallel_cross_entropy, vocabulary=model.head.out_features)
    parallelize_with_sequence(model)
    return Prepared(model, loss, partial(sum_replicated_gradients, model))


def flat_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """PyTorch's loss of logits (batch, sequence, vocabulary); in float32 at least."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(wide.flatten(0, 1), targets.flatten())


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


def loss_and_gradients(prepared: Prepared, step: int = 0) -> torch.Tensor:
    """Forward and backward of a step's batch, without the optimizer; returns the loss."""
    tokens, targets = new_batch(step)
    with prepared.context():
        loss = prepared.loss(prepared.model(tokens), targets)
        loss.backward()
    prepared.after_backward()
    return as_whole(loss)


def train(
    rank: int, world_size: int, way: Way, steps: int = 5, **model: object
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with Adam; the loss of each step, and the whole parameters by name."""
    prepared = way(new_model(**model))
    optimizer = torch.optim.Adam(prepared.model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(loss_and_gradients(prepared, step).item())
        optimizer.step()
    return losses, whole_values(prepared.model)


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
