"""Experts that live on several ranks, and a model that has them."""

import torch.distributed as dist
from torch import Tensor, nn

from mgpu_tutorial.experts.exchange import Group, combine, dispatch
from mgpu_tutorial.experts.layer import Experts, drawn, run_experts


class ExpertParallel(Experts):
    """The same layer, but each rank of the group keeps only its share of the experts."""

    def __init__(self, experts: int, k: int, group: Group = None) -> None:
        super().__init__(experts, k)
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        if experts % ranks:
            raise ValueError(f"{experts} experts on {ranks} ranks: use a multiple of {ranks}")
        self.group = group
        self.up = nn.Parameter(self.up.detach().chunk(ranks)[rank].clone())
        self.down = nn.Parameter(self.down.detach().chunk(ranks)[rank].clone())

    def answer(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        rows = x.repeat_interleave(self.k, dim=0)
        arrived, which, way = dispatch(rows, chosen.flatten(), self.experts, self.group)
        results = run_experts(arrived, which, self.up, self.down)
        return combine(results, way, weights, self.group)


class Model(nn.Module):
    """A dense layer, and above it experts that add to its output."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.below = nn.Parameter(drawn(4, 16, 16))
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ self.below
        return hidden + self.experts(hidden)


def run(model: Model, tokens: int = 24) -> Tensor:
    """Forward and backward of this rank's share of `tokens`; returns the output."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = drawn(5, 2, tokens, 16)  # the input and its target
    x, target = data.tensor_split(world_size, dim=1)[rank]
    output = model(x)
    # The mean of the ranks' losses is the loss of all tokens, whatever the shares.
    loss = (output - target).square().sum() * world_size / (tokens * 16)
    loss.backward()
    return output.detach()
