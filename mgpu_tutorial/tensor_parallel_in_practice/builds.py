"""What the loss of a vocabulary that is cut must do, on real ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, pad

from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.trace import span
from mgpu_tutorial.lab.teach.build import Builder, launch
from mgpu_tutorial.tensor_parallel.builds import Rows, compare
from mgpu_tutorial.tensor_parallel_in_practice import vocabulary

TARGETS = torch.arange(14).view(2, 7) % 12  # every token of a vocabulary of twelve
LOGITS = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(0)).double()


def _lose(
    rank: int,
    world_size: int,
    loss_of: Callable,
    logits: torch.Tensor,
    targets: torch.Tensor,
    size: int,
) -> Rows:
    """The loss of logits of which each rank has a part, and this part's gradient.

    The ranks are in groups of `size`; the second group has twice the logits.
    """
    group, _ = dist.new_subgroups(size)
    whole = (logits * (1 + rank // size)).requires_grad_()
    mine = whole.detach().chunk(size, -1)[rank % size].requires_grad_()
    expected = cross_entropy(whole.flatten(0, 1), targets.flatten())
    expected.backward()
    with span("loss"):
        loss = loss_of(mine, targets, group)
    if loss is not None:  # the row says what is missing
        loss.backward()
    its, what = whole.grad.chunk(size, -1)[rank % size], "logits' gradient"
    if mine.grad is not None and mine.grad.isnan().any():
        what += " (does one flow through the maximum? It needs none)"
    return [("loss", loss, expected), (what, mine.grad, its)]


def is_the_mean_loss(loss_of: Callable) -> None:
    """give every rank its group's mean loss, and the gradient of its own logits"""
    compare(_lose, loss_of, LOGITS, TARGETS)


def does_not_overflow(loss_of: Callable) -> None:
    """give the right loss for logits of some thousands, whose exp() is infinite"""
    compare(_lose, loss_of, 3000 * LOGITS, TARGETS)


def bears_padding(loss_of: Callable) -> None:
    """give the right loss where the last rank has only padding: logits of minus infinity"""
    logits = pad(LOGITS, (0, 6), value=float("-inf"))
    compare(_lose, loss_of, logits, TARGETS, groups=[(3, 3)])


def leaves_out_minus_100(loss_of: Callable) -> None:
    """leave out positions whose target is −100, and give the mean of the others"""
    targets = TARGETS.where(TARGETS > 4, -100)
    compare(_lose, loss_of, LOGITS, targets, groups=[(1, 1), (3, 3)])


def _refuse(rank: int, world_size: int, loss_of: Callable, target: int) -> str:
    targets = TARGETS.clone()
    targets[1, 3] = target
    try:
        return f"no error, and the loss {loss_of(LOGITS.chunk(2, -1)[rank], targets):.3g}"
    except (AssertionError, IndexError, RuntimeError, ValueError):
        return "an error"


def refuses_other_targets(loss_of: Callable) -> None:
    """raise an error on every rank where a target is in no rank's part"""
    for target in 12, -1:
        for rank, found in enumerate(launch(_refuse, 2, loss_of, target).results):
            assert found == "an error", f"target {target} of 12, rank {rank}: {found}"


def sends_three_numbers(loss_of: Callable) -> None:
    """send at most three numbers per token, whatever the vocabulary"""
    report = launch(_lose, 3, loss_of, LOGITS, TARGETS, 3, trace=True)
    sent = sum(event.nbytes for event in events_of(report, "loss") if event.rank == 0)
    numbers = sent / 8 / TARGETS.numel()
    assert numbers <= 3, f"rank 0 sends {numbers:g} numbers per token"


def _in_autocast(rank: int, world_size: int, loss_of: Callable) -> tuple[float, float]:
    """The loss of logits in bfloat16, and that of one process in float32."""
    logits = 8 * LOGITS.bfloat16()
    with torch.autocast(logits.device.type, torch.bfloat16):
        loss = loss_of(logits.chunk(world_size, -1)[rank], TARGETS)
    expected = cross_entropy(logits.float().flatten(0, 1), TARGETS.flatten())
    return float(loss), expected.item()


def bears_autocast(loss_of: Callable) -> None:
    """give for logits of 16 bits, in bfloat16 autocast, the loss of one process in float32"""
    for loss, expected in launch(_in_autocast, 2, loss_of).results:
        off = abs(loss / expected - 1)
        assert off < 1e-5, f"2 ranks in bfloat16 autocast: {loss:.4f}, off by {off:.2%}"


build = Builder(
    "tensor_parallel_in_practice",
    {
        vocabulary.parallel_cross_entropy: [
            is_the_mean_loss,
            does_not_overflow,
            bears_padding,
            leaves_out_minus_100,
            refuses_other_targets,
            bears_autocast,
            sends_three_numbers,
        ]
    },
)
