"""What the loss of a vocabulary that is cut must do, on real ranks."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, pad

from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.trace import span
from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.tensor_parallel_in_practice import vocabulary

TARGETS = torch.arange(14).view(2, 7) % 12  # every token of a vocabulary of twelve


def _logits(scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(2, 7, 12, generator=generator, dtype=torch.float64)


def _lose(
    rank: int, world_size: int, loss_of: Callable, logits: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of logits of which each rank has a part, and the gradient of this part.

    The ranks are in groups of `size`; the second group has twice the logits.
    """
    groups = [dist.new_group(range(i, i + size)) for i in range(0, world_size, size)]
    mine = logits.chunk(size, -1)[rank % size] * (1 + rank // size)
    mine.requires_grad_()
    with span("loss"):
        loss = loss_of(mine, TARGETS, groups[rank // size])
    loss.backward()
    return loss.detach(), mine.grad


def _alone(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole = logits.clone().requires_grad_()
    loss = cross_entropy(whole.flatten(0, 1), TARGETS.flatten())
    loss.backward()
    return loss.detach(), whole.grad


def _compare(
    loss_of: Callable, place: int, logits: torch.Tensor, ranks: Sequence[int] = (1, 3)
) -> None:
    """Compare the loss (`place` 0) or the gradient (1) with that of one process."""
    what = ("loss", "logits' gradient")[place]
    loss, gradient = _alone(logits)
    for n in ranks:
        for rank, found in enumerate(launch(_lose, n, loss_of, logits, n).results):
            expected = loss, gradient.chunk(n, -1)[rank]
            expect(found[place], expected[place], f"rank {rank} of {n}: the {what}", 1e-9)


def is_the_mean_loss(loss_of: Callable) -> None:
    """give every rank the mean loss over the whole vocabulary"""
    _compare(loss_of, 0, _logits(1.0))


def leaves_the_gradients(loss_of: Callable) -> None:
    """leave each rank the gradient of its own logits"""
    _compare(loss_of, 1, _logits(1.0))


def does_not_overflow(loss_of: Callable) -> None:
    """give the right loss for logits of some thousands, whose exp() is infinite"""
    _compare(loss_of, 0, _logits(3000.0))


def bears_padding(loss_of: Callable) -> None:
    """give the right loss where the last rank has only padding: logits of minus infinity"""
    logits = pad(_logits(1.0), (0, 6), value=float("-inf"))
    for place in (0, 1):
        _compare(loss_of, place, logits, ranks=[3])


def stays_in_its_group(loss_of: Callable) -> None:
    """use the logits of the ranks of `group` only"""
    for rank, found in enumerate(launch(_lose, 4, loss_of, _logits(1.0), 2).results):
        loss, gradient = _alone(_logits(1.0 + rank // 2))
        who = f"with ranks 2 and 3 in another group, rank {rank}: the"
        expect(found[0], loss, f"{who} loss", 1e-9)
        expect(found[1], gradient.chunk(2, -1)[rank % 2], f"{who} logits' gradient", 1e-9)


def sends_three_numbers(loss_of: Callable) -> None:
    """send at most three numbers per token, whatever the vocabulary"""
    report = launch(_lose, 3, loss_of, _logits(1.0), 3, trace=True)
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
            bears_padding,
            stays_in_its_group,
            sends_three_numbers,
        ]
    },
)
