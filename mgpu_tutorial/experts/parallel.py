"""Experts on several ranks: rows go to their experts, and the results come back."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from mgpu_tutorial.experts.layer import Experts, drawn, require_experts, run_experts
from mgpu_tutorial.shared.groups import copy_in_group, require_whole, size_of
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
    ranks = size_of(group)
    require_share(experts, ranks)
    require_experts(which, experts, len(rows))
    order = which.argsort(stable=True)  # by expert, so by rank too
    counts = which.bincount(minlength=experts)  # my rows for each expert
    theirs = torch.empty_like(counts)  # from each rank, its rows for each of my experts
    dist.all_to_all_single(theirs, counts, group=group)
    sent = counts.view(ranks, -1).sum(dim=1).tolist()
    received = theirs.view(ranks, -1).sum(dim=1).tolist()
    arrived = Exchange.apply(rows[order], sent, received, group)
    mine = torch.arange(experts // ranks).repeat(ranks)
    return arrived, mine.repeat_interleave(theirs), (order, sent, received)


def combine(results: Tensor, way: tuple, weights: Tensor, group: Group = None) -> Tensor:
    """Bring the results home and add up each token's, weighed: (tokens, width).

    `weights` are (tokens, k); as (k, tokens) they would be taken for k tokens.
    """
    order, sent, received = way
    if len(results) != sum(received) or weights.dim() != 2 or weights.numel() != len(order):
        given = f"{len(results)} results and weights of shape {tuple(weights.shape)}"
        raise ValueError(f"{given} for {sum(received)} rows here and {len(order)} at home")
    sorted_rows = Exchange.apply(results, received, sent, group)
    rows = sorted_rows[order.argsort()]  # to the places from which they left
    return (weights[..., None] * rows.unflatten(0, weights.shape)).sum(dim=1)


def require_share(experts: int, ranks: int) -> None:
    """ValueError, on every rank, unless each gets equally many experts."""
    if experts % ranks:
        raise ValueError(f"{experts} experts on {ranks} ranks: use a multiple of {ranks}")


def share_in(layer: Experts, group: Group) -> None:
    """Note the group on the layer, and on its experts that no other rank has them."""
    layer.group = group
    for parameter in (layer.up, layer.down):
        parameter.own, parameter.group, parameter.cut = True, group, 0


class ExpertParallel(Experts):
    """The same layer, but each rank of the group keeps only its share of the experts."""

    def __init__(self, experts: int, k: int, group: Group = None) -> None:
        super().__init__(experts, k)
        rank, ranks = dist.get_rank(group), size_of(group)
        require_share(experts, ranks)
        self.up = nn.Parameter(self.up.detach().chunk(ranks)[rank].clone())
        self.down = nn.Parameter(self.down.detach().chunk(ranks)[rank].clone())
        share_in(self, group)

    def answer(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        rows = x.repeat_interleave(self.k, dim=0)
        arrived, which, way = dispatch(rows, chosen.flatten(), self.experts, self.group)
        results = run_experts(arrived, which, self.up, self.down)
        return combine(results, way, weights, self.group)


def copy_experts(layer: ExpertParallel, memo: dict) -> ExpertParallel:
    """A deep copy whose experts are known as this rank's own, as those of the first are."""
    share_in(other := copy_in_group(layer, memo), layer.group)
    return other


ExpertParallel.__deepcopy__ = copy_experts


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


def require_copies(layer: Experts, copies: Group) -> None:
    """ValueError unless `copies` can be the ranks with the same experts: None is all."""
    sharing, ranks = layer.experts // len(layer.up), dist.get_world_size()
    if size_of(copies) * sharing != ranks:
        raise ValueError(
            f"{sharing} ranks share the experts and {size_of(copies)} are said to have "
            f"copies of one, which makes {ranks} ranks only as a product: give the group of "
            "the ranks with this rank's experts, and of this rank alone without copies"
        )
    require_whole([("up", layer.up), ("down", layer.down)], copies)


def with_gradients(model: ExpertModel, *sharing: Group) -> Experts:
    """The layer of a model after backward; RuntimeError where a gradient is missing.

    Raises ValueError where a group is given that does not share one copy of the experts.
    """
    if missing := [name for name, p in model.named_parameters() if p.grad is None]:
        raise RuntimeError(
            f"no gradient in {', '.join(missing)}: backward comes first, and a part that is "
            "frozen on all ranks is not averaged by this function"
        )
    known = {model.below, *model.experts.parameters()}
    if others := [name for name, p in model.named_parameters() if p not in known]:
        raise ValueError(
            f"{', '.join(others)} would be averaged by nobody: this function knows the layer "
            "below and the experts, so average the gradients of others beside it"
        )
    for group in sharing:
        require_sharing(model.experts, group)
    return model.experts


def with_averaged_gradients(model: ExpertModel, experts: Group) -> Experts:
    """As `with_gradients`; RuntimeError where they are not averaged yet."""
    layer = with_gradients(model, experts)
    if not hasattr(layer.up.grad, "averaged"):
        raise RuntimeError(
            "these are the gradients of this rank's own tokens, so each rank would find "
            "another norm: call average_gradients first"
        )
    return layer


def with_own_gradients(model: ExpertModel, copies: Group) -> Experts:
    """As `with_gradients`; RuntimeError where they are averaged already."""
    layer = with_gradients(model)
    if hasattr(layer.up.grad, "averaged"):
        raise RuntimeError(
            "these gradients are averaged already, and a second time would divide them "
            "again: call zero_grad, by which they are None, and backward in between"
        )
    require_copies(layer, copies)
    return layer


def require_sharing(layer: Experts, experts: Group) -> None:
    """ValueError unless these are the ranks that share one copy of the experts."""
    sharing = layer.experts // len(layer.up)
    if size_of(experts) != sharing:
        raise ValueError(
            f"{sharing} ranks share the experts, and this group has {size_of(experts)}, so "
            "some would count twice or not at all: give the group of the layer"
        )


def average_gradients(model: ExpertModel, copies: Group) -> None:
    """Sum over the ranks with a copy, divided by the ranks whose tokens it saw: all."""
    layer = with_own_gradients(model, copies)
    for parameter in (model.below, layer.router):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    for parameter in (layer.up, layer.down):
        dist.all_reduce(parameter.grad, group=copies)
        parameter.grad /= dist.get_world_size()
    layer.up.grad.averaged = True  # a second average is refused


def norm_of_all(model: ExpertModel, experts: Group) -> Tensor:
    """The norm of the whole averaged gradient, in which each parameter counts once."""
    layer = with_averaged_gradients(model, experts)
    mine = layer.up.grad.square().sum() + layer.down.grad.square().sum()
    dist.all_reduce(mine, group=experts)  # the experts of one copy
    dense = model.below.grad.square().sum() + layer.router.grad.square().sum()
    return (mine + dense).sqrt()


def step(rank: int, world_size: int, copies: int, k: int = 2, tokens: int = 24) -> dict:
    """The ranks keep `copies` of all 8 experts; output, averaged gradients, their norm."""
    if copies < 1 or world_size % copies:
        raise ValueError(f"{copies} copies of the experts cannot share {world_size} ranks")
    if tokens < 1:
        raise ValueError(f"{tokens} tokens have no mean loss")
    shape, names = (copies, world_size // copies), ("copies", "experts")
    mesh = init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=names)
    model = ExpertModel(ExpertParallel(8, k, mesh.get_group("experts")))
    found = {"output": run(model, tokens)}
    average_gradients(model, mesh.get_group("copies"))
    found["norm"] = norm_of_all(model, mesh.get_group("experts"))
    return found | {name: p.grad for name, p in model.named_parameters()}
