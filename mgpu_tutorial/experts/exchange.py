"""Rows go to the ranks of their experts, and the results come back."""

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None  # None: all ranks
Way = tuple[Tensor, list[int], list[int]]  # the order of the rows, sent and received


class Exchange(torch.autograd.Function):
    """Send `sent[r]` rows to rank r and receive `received[r]`; gradients go the way back."""

    @staticmethod
    def forward(ctx, rows: Tensor, sent: list, received: list, group: Group = None) -> Tensor:
        ctx.way = sent, received, group
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group)
        return arrived

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        sent, received, group = ctx.way
        return Exchange.apply(gradient, received, sent, group), None, None, None


def dispatch(
    rows: Tensor, which: Tensor, experts: int, group: Group = None
) -> tuple[Tensor, Tensor, Way]:
    """Send row i to the rank of the expert `which[i]`.

    Rank 0 has the first experts, rank 1 the next. Returns the rows that arrive here, for each
    of them the number of its expert among this rank's own, and the way back.
    """
    ranks = dist.get_world_size(group)
    order = which.argsort(stable=True)  # by expert, so by rank too
    counts = which.bincount(minlength=experts)  # my rows for each expert
    theirs = torch.empty_like(counts)  # from each rank, its rows for each of my experts
    dist.all_to_all_single(theirs, counts, group=group)
    sent = counts.view(ranks, -1).sum(dim=1).tolist()
    received = theirs.view(ranks, -1).sum(dim=1).tolist()
    arrived = Exchange.apply(rows[order], sent, received, group)
    mine = torch.arange(experts // ranks).repeat(ranks)
    return arrived, mine.repeat_interleave(theirs), (order, sent, received)


def combine(results: Tensor, way: Way, weights: Tensor, group: Group = None) -> Tensor:
    """Bring the results home and add up each token's, weighed: (tokens, width)."""
    order, sent, received = way
    sorted_rows = Exchange.apply(results, received, sent, group)
    rows = sorted_rows[order.argsort()]  # to the places from which they left
    return (weights[..., None] * rows.unflatten(0, weights.shape)).sum(dim=1)
