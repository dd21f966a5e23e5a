"""What `dispatch` and `combine` must do, on real ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from mgpu_tutorial.experts.layer import drawn
from mgpu_tutorial.experts.parallel import combine, dispatch
from mgpu_tutorial.lab.teach.build import Builder, expect, launch

EXPERTS = 12  # for 1, 2, 3 and 4 ranks
SHARES = {1: [6], 2: [5, 2], 3: [4, 0, 3], 4: [3, 1, 2, 4]}  # rows of each rank


def _rows_of(rank: int, world_size: int, only: int | None = None) -> tuple[torch.Tensor, ...]:
    """A rank's rows and their experts; the row of place i on rank r begins with 100 r + i."""
    count = SHARES[world_size][rank]
    rows = drawn(rank, count, 3)
    rows[:, 0] = 100 * rank + torch.arange(count)
    which = torch.tensor([(7 * (i + 1) + 5 * rank) % EXPERTS for i in range(count)]).long()
    return rows, which if only is None else torch.full_like(which, only)


def _sends(rank: int, world_size: int, dispatch: Callable, only: int | None = None) -> tuple:
    """The rows that arrive here, in the order of their names, and their experts."""
    gone = dispatch(*_rows_of(rank, world_size, only), EXPERTS)
    if gone is None:
        return None, None
    arrived, which, _ = gone
    order = arrived[:, 0].argsort()
    return arrived.detach()[order], which[order]


def reaches_its_expert(dispatch: Callable) -> None:
    """bring each row, with the number of its expert, to the rank of that expert"""
    for world_size, only in (1, None), (2, None), (4, None), (3, None), (4, 5):
        every = [_rows_of(r, world_size, only) for r in range(world_size)]
        rows, which = (torch.cat(parts) for parts in zip(*every, strict=True))
        own = EXPERTS // world_size
        found = launch(_sends, world_size, dispatch, only).results
        for rank, (arrived, numbers) in enumerate(found):
            mine, who = which // own == rank, f"on rank {rank} of {world_size}"
            expect(arrived, rows[mine], f"{who} the arriving rows, each begins with its name")
            what = "the numbers of their experts (are rows and numbers in the same order?)"
            expect(numbers, which[mine] % own, f"{who} {what}")


def _returns(rank: int, world_size: int, dispatch: Callable, combine: Callable) -> list:
    """Each token's two rows go to experts that answer a row times their number + 1."""
    count = SHARES[world_size][rank]
    x, weights = drawn(rank, count, 3).requires_grad_(), drawn(9 + rank, count, 2)
    _, which = _rows_of(rank, world_size)
    chosen = torch.stack([which, (which + 5) % EXPERTS], dim=1)
    weights.requires_grad_()
    rows = x.repeat_interleave(2, dim=0)
    arrived, mine, way = dispatch(rows, chosen.flatten(), EXPERTS)
    first = EXPERTS // world_size * dist.get_rank()
    output = combine(arrived * (first + mine + 1)[:, None], way, weights)
    expected = x * (weights * (chosen + 1)).sum(dim=1, keepdim=True)
    wanted = torch.autograd.grad(expected.square().sum(), (x, weights))
    found = [None, None]
    if output is not None and output.shape == x.shape and output.requires_grad:
        found = torch.autograd.grad(output.square().sum(), (x, weights), allow_unused=True)
    output = output if output is None else output.detach()
    return [(output, expected.detach()), *zip(found, wanted, strict=True)]


def _expect_returned(world_size: int, dispatch: Callable, combine: Callable) -> None:
    """AssertionError unless output and gradients are those of a plain weighed sum."""
    results = launch(_returns, world_size, dispatch, combine).results
    for rank, (output, *gradients) in enumerate(results):
        who = f"on rank {rank} of {world_size}"
        expect(*output, f"{who} the output", within=1e-12)
        for name, (found, wanted) in zip(("tokens", "weights"), gradients, strict=True):
            assert found is not None, f"{who}: no gradient reaches the {name}"
            expect(found, wanted, f"{who} the gradient of the {name}", within=1e-9)


def comes_home(combine: Callable) -> None:
    """give each token the weighted sum of its own results, and gradients too"""
    for world_size in (1, 2, 3, 4):  # of three, one is without tokens
        _expect_returned(world_size, dispatch, combine)


def lets_gradients_back(dispatch: Callable) -> None:
    """let the gradients of the rows come back, and bring them to the right row"""
    for world_size in (1, 4):
        _expect_returned(world_size, dispatch, combine)


def sends_twice(dispatch: Callable) -> None:
    """send the counts and then the rows, and each of them once"""
    report = launch(_sends, 2, dispatch, trace=True)
    for rank in range(2):
        ops = [e.op for e in report.events if e.rank == rank and e.op != "barrier"]
        expect(ops, ["all_to_all_single"] * 2, f"the calls of rank {rank}")


build = Builder(
    "experts",
    {dispatch: [reaches_its_expert, lets_gradients_back, sends_twice], combine: [comes_home]},
)
