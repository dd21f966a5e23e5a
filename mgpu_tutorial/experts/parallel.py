"""Experts on several ranks: rows go to their experts, and the results come back."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from mgpu_tutorial.experts.layer import Experts, drawn, run_experts
from mgpu_tutorial.shared.guards import divides
from mgpu_tutorial.tensor_parallel.layers import Group


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


def dispatch(rows: Tensor, which: Tensor, experts: int, group: Group = None) -> tuple:
    """Send row i to the rank of the expert `which[i]`; rank 0 has the first experts.

    Returns the rows that arrive here, the number of each one's expert among this rank's own,
    and the way back: the order of the rows, and how many were sent and received.
    """
    ranks = dist.get_world_size(group)
    order = which.argsort(stable=True)  # by expert, so by rank as well
    counts = which.bincount(minlength=experts)  # my rows for each expert
    if len(which) != len(rows):
        raise ValueError(f"{len(rows)} rows, but {len(which)} choices")
    if len(counts) > experts:
        raise ValueError(f"there is no expert {which.max()} of {experts}")
    if experts % ranks:
        raise ValueError(f"{experts} experts have no {ranks} equal parts")
    theirs = torch.empty_like(counts)  # their rows for each of my experts
    dist.all_to_all_single(theirs, counts, group=group)
    sent = counts.view(ranks, -1).sum(dim=1).tolist()
    received = theirs.view(ranks, -1).sum(dim=1).tolist()
    arrived = Exchange.apply(rows[order], sent, received, group)
    mine = torch.arange(experts // ranks, device=rows.device).repeat(ranks)
    return arrived, mine.repeat_interleave(theirs), (order, sent, received)


def combine(results: Tensor, way: tuple, weights: Tensor, group: Group = None) -> Tensor:
    """Bring the results home and add up each token's, weighed: (tokens, width).

    `weights` are (tokens, k); as (k, tokens) they would be taken for k tokens.
    """
    order, sent, received = way
    back = Exchange.apply(results, received, sent, group)
    rows = back[order.argsort()]  # to the places from which they left
    return (weights[..., None] * rows.unflatten(0, weights.shape)).sum(dim=1)


class ExpertParallel(Experts):
    """The same layer, but each rank of the group keeps only its share of the experts."""

    def __init__(self, experts: int, k: int, group: Group = None) -> None:
        super().__init__(experts, k)
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        divides("experts", experts, ranks)
        self.up = nn.Parameter(self.up.detach().chunk(ranks)[rank].clone())
        self.down = nn.Parameter(self.down.detach().chunk(ranks)[rank].clone())
        self.group = group
        for parameter in (self.up, self.down):  # which no other rank has
            parameter.own, parameter.group, parameter.cut = True, group, 0

    def answer(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        rows = x.repeat_interleave(self.k, dim=0)
        arrived, which, way = dispatch(rows, chosen.flatten(), self.experts, self.group)
        results = run_experts(arrived, which, self.up, self.down)
        return combine(results, way, weights, self.group)


class ExpertModel(nn.Module):
    """A dense layer, and above it experts that add to its output."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.below = nn.Parameter(drawn(4, 16, 16))
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ self.below
        return hidden + self.experts(hidden)


def run(model: ExpertModel, tokens: int = 24) -> Tensor:
    """Forward and backward of this rank's share of `tokens`; returns the output."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = drawn(5, 2, tokens, 16)  # the input and its target
    x, target = data.tensor_split(world_size, dim=1)[rank]
    output = model(x)
    # The mean of the ranks' losses is the loss of all tokens, whatever the shares.
    loss = (output - target).square().sum() * world_size / (tokens * 16)
    loss.backward()
    return output.detach()


def average_gradients(model: ExpertModel, copies: Group) -> None:
    """Sum over the ranks with a copy, divided by the ranks whose tokens it saw: all."""
    layer = model.experts
    for parameter in (model.below, layer.router):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    for parameter in (layer.up, layer.down):
        dist.all_reduce(parameter.grad, group=copies)
        parameter.grad /= dist.get_world_size()


def norm_of_all(model: ExpertModel, experts: Group) -> Tensor:
    """The norm of the whole averaged gradient, in which each parameter counts once."""
    layer = model.experts
    mine = layer.up.grad.square().sum() + layer.down.grad.square().sum()
    dist.all_reduce(mine, group=experts)  # the experts of one copy
    dense = model.below.grad.square().sum() + layer.router.grad.square().sum()
    return (mine + dense).sqrt()


def step(rank: int, world_size: int, copies: int, k: int = 2, tokens: int = 24) -> dict:
    """The ranks keep `copies` of all 8 experts; output, averaged gradients, their norm."""
    shape, names = (copies, world_size // copies), ("copies", "experts")
    mesh = init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=names)
    model = ExpertModel(ExpertParallel(8, k, mesh.get_group("experts")))
    found = {"output": run(model, tokens)}
    average_gradients(model, mesh.get_group("copies"))
    found["norm"] = norm_of_all(model, mesh.get_group("experts"))
    return found | {name: p.grad for name, p in model.named_parameters()}
