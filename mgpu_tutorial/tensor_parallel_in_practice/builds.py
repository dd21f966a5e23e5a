"""What the loss of a cut vocabulary and the operators of a cut sequence must do, on ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, pad

from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.trace import span
from mgpu_tutorial.lab.teach.build import Builder, launch
from mgpu_tutorial.tensor_parallel.builds import Rows, compare
from mgpu_tutorial.tensor_parallel_in_practice import sequence, vocabulary

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


# Two sequences between the products


def _texts(size: int, first: int) -> torch.Tensor:
    """Two sequences with two tokens for each of `size` ranks, each told by its numbers.

    The tokens of the one are first, first + 1, …, those of the other 100 more, and there are
    three features: a number, its half, and the same negative.
    """
    numbers = first + torch.arange(2.0 * size)
    numbers = torch.stack([numbers, numbers + 100])
    return torch.stack([numbers, numbers / 2, -numbers], -1)


def _first(name: str, found: object, expected: torch.Tensor) -> tuple:
    """A row about the first feature of both sequences, if the shape is right."""
    if getattr(found, "shape", None) == expected.shape:
        return f"{name}, the first feature of each token", found[..., 0], expected[..., 0]
    return name, found, expected


def _join(rank: int, world_size: int, join: Callable, size: int) -> Rows:
    """Rank r of a group has tokens 2 r and 2 r + 1; those of the second group are 50 more."""
    group, _ = dist.new_subgroups(size)
    texts = _texts(size, 50 * (rank // size))
    mine = texts.chunk(size, 1)[rank % size].clone()
    given, found = mine.clone(), join(mine, group)
    rows = [_first("output", found, texts), ("output", found, texts)]
    return [*rows, ("input afterwards", mine, given)]


def _sum_up(rank: int, world_size: int, add: Callable, size: int) -> Rows:
    """Rank r has all tokens, r + 1 times as large; a rank gets the sum for two of them."""
    group, _ = dist.new_subgroups(size)
    texts = _texts(size, 50 * (rank // size))
    part = texts * (1 + rank % size)
    expected = sum(range(1, size + 1)) * texts.chunk(size, 1)[rank % size]
    given, found = part.clone(), add(part, group)
    rows = [_first("output", found, expected), ("output", found, expected)]
    return [*rows, ("input afterwards", part, given)]


def joins_in_order(gathered: Callable) -> None:
    """put the parts of each sequence side by side, in the order of the group's ranks"""
    compare(_join, gathered)


def sums_own_tokens(scattered_sum: Callable) -> None:
    """give every rank the sum of its group's parts, for its own tokens"""
    compare(_sum_up, scattered_sum)


def _sends_half(worker: Callable, function: Callable) -> None:
    """An all-reduce gives the right numbers too, if it is cut afterwards, but sends twice."""
    report = launch(worker, 3, function, 3, trace=True)
    mine = [event for event in events_of(report) if event.rank == 0 and event.group]
    passes = sum(e.nbytes * (3 if "reduce_scatter" in e.op else 1) for e in mine)
    passes += sum(e.nbytes for e in mine if e.op == "all_reduce")
    half = _texts(3, 0).nbytes
    assert passes <= half, f"on 3 ranks {passes / half:g} times half of an all-reduce"


def gathers_by_half(gathered: Callable) -> None:
    """send at most half of what an all-reduce of the whole sequences sends"""
    _sends_half(_join, gathered)


def scatters_by_half(scattered_sum: Callable) -> None:
    """send at most half of what an all-reduce of the whole sequences sends"""
    _sends_half(_sum_up, scattered_sum)


def _back(rank: int, world_size: int, operator: type, is_gather: bool, size: int) -> Rows:
    """Forward, and backward of gradients that lie in memory in another order."""
    group, _ = dist.new_subgroups(size)
    texts = _texts(size, 50 * (rank // size))
    own, whole = texts.chunk(size, 1)[rank % size], texts * (1 + rank % size)
    total = sum(range(1, size + 1)) * own
    # what this rank gives forward and back, and what it should get
    given = (own, whole) if is_gather else (whole, own)
    expected = (texts, total) if is_gather else (total, texts)
    x, gradient = given[0].clone().requires_grad_(), given[1].mT.contiguous().mT
    output = operator.apply(x, group)
    if output is not None:  # the row says what is missing
        output.backward(gradient)
    rows = [_first("output", output, expected[0]), ("output", output, expected[0])]
    rows += [_first("input's gradient", x.grad, expected[1])]
    return [*rows, ("input's gradient", x.grad, expected[1])]


def gathers_and_sums_back(operator: type) -> None:
    """gather in forward, and give each rank in backward the sum for its own tokens"""
    compare(_back, operator, True)


def sums_and_gathers_back(operator: type) -> None:
    """give each rank in forward the sum for its own tokens, and gather in backward"""
    compare(_back, operator, False)


def _in_bfloat16(rank: int, world_size: int, operator: type, size: int) -> Rows:
    """Under autocast, with whole numbers that 16 bits can hold."""
    x = _texts(size, 0)[..., :1].bfloat16().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16):
        output = operator.apply(x)
    output.sum().backward()
    return [
        (f"{name} in bfloat16 autocast", str(tensor.dtype), "torch.bfloat16")
        for name, tensor in (("output", output), ("input's gradient", x.grad))
    ]


def bears_bfloat16(operator: type) -> None:
    """hand on bfloat16 as bfloat16 under autocast, so that no message is twice as long"""
    compare(_in_bfloat16, operator, groups=[(2, 2)])


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
        ],
        sequence.gathered: [joins_in_order, gathers_by_half],
        sequence.scattered_sum: [sums_own_tokens, scatters_by_half],
        sequence.GatherSequence: [gathers_and_sums_back, bears_bfloat16],
        sequence.ScatterSequence: [sums_and_gathers_back, bears_bfloat16],
    },
)
