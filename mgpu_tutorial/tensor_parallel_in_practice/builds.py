"""What the loss of a vocabulary that is cut must do, on real ranks."""

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.trace import span
from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.tensor_parallel_in_practice import vocabulary

TARGETS = torch.arange(14).view(2, 7) % 12  # every token of a vocabulary of twelve


def _logits(scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(2, 7, 12, generator=generator, dtype=torch.float64)


def _lose(
    rank: int, world_size: int, loss_of: Callable, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of logits of which each rank has a part, and the gradient of this part."""
    mine = _logits(scale).chunk(world_size, -1)[rank].clone().requires_grad_()
    with span("loss"):
        loss = loss_of(mine, TARGETS)
    loss.backward()
    return loss.detach(), mine.grad


def _compare(loss_of: Callable, place: int, what: str, scale: float = 1.0) -> None:
    whole = _logits(scale).requires_grad_()
    loss = cross_entropy(whole.flatten(0, 1), TARGETS.flatten())
    loss.backward()
    for n in (1, 2, 3):
        for rank, found in enumerate(launch(_lose, n, loss_of, scale).results):
            expected = loss.detach(), whole.grad.chunk(n, -1)[rank]
            expect(found[place], expected[place], f"rank {rank} of {n}: the {what}", 1e-9)


def is_the_mean_loss(loss_of: Callable) -> None:
    """give every rank the mean loss over the whole vocabulary"""
    _compare(loss_of, 0, "loss")


def leaves_the_gradients(loss_of: Callable) -> None:
    """leave each rank the gradient of its own logits"""
    _compare(loss_of, 1, "logits' gradient")


def does_not_overflow(loss_of: Callable) -> None:
    """give the right loss for logits of some thousands, whose exp() is infinite"""
    _compare(loss_of, 0, "loss", scale=3000.0)


def sends_three_numbers(loss_of: Callable) -> None:
    """send at most three numbers per token, whatever the vocabulary"""
    report = launch(_lose, 3, loss_of, trace=True)
    sent = sum(event.nbytes for event in events_of(report, "loss") if event.rank == 0)
    numbers = sent / 8 / TARGETS.numel()
    assert numbers <= 3, f"rank 0 sends {numbers:g} numbers per token"


build = Builder(
    "tensor_parallel_in_practice",
    {
        vocabulary.parallel_cross_entropy: [
            is_the_mean_loss,
            leaves_the_gradients,
            does_not_overflow,
            sends_three_numbers,
        ]
    },
)
