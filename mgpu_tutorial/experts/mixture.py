"""Experts in a model of Llama's kind: each MLP becomes several, on several ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mgpu_tutorial.experts.layer import choose
from mgpu_tutorial.experts.parallel import Exchange
from mgpu_tutorial.instruments.price.models import GatedMLP
from mgpu_tutorial.shared.guards import divides


class Mixture(nn.Module):
    """A router, and this rank's share of some experts, of which two answer each token."""

    def __init__(
        self, mlp: GatedMLP, experts: int, dispatch: Callable, combine: Callable
    ) -> None:
        super().__init__()
        divides("experts", experts, dist.get_world_size())
        share = experts // dist.get_world_size()
        inside, width = mlp.up.weight.shape
        self.experts, self.dispatch, self.combine = experts, dispatch, combine
        torch.manual_seed(experts)  # the same on any number of ranks
        self.router = nn.Linear(width, experts, bias=False)
        self.own = nn.ModuleList(GatedMLP(width, inside) for _ in range(share))
        for expert, mlp in enumerate(self.own):
            torch.manual_seed(share * dist.get_rank() + expert)
            for matrix in mlp.parameters():
                nn.init.normal_(matrix, std=width**-0.5)

    def whole_tensors(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """The experts of all ranks, or their gradients, by their names on one."""
        whole = {name: t for name, t in own.items() if not name.startswith("own.")}
        for name in [name for name in own if name not in whole]:
            _, expert, rest = name.split(".", 2)
            every = [torch.empty_like(own[name]) for _ in range(dist.get_world_size())]
            dist.all_gather(every, own[name])
            for rank, part in enumerate(every):
                whole[f"own.{rank * len(self.own) + int(expert)}.{rest}"] = part
        return whole

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)  # (tokens, width)
        scores = self.router(tokens)
        chosen = choose(scores, k=2)  # (tokens, 2)
        weights = scores.softmax(dim=1).gather(1, chosen)
        rows = tokens.repeat_interleave(2, dim=0)
        arrived, which, way = self.dispatch(rows, chosen.flatten(), self.experts)
        return self.combine(self.answers(arrived, which), way, weights).view_as(x)

    def answers(self, arrived: Tensor, which: Tensor) -> Tensor:
        """What this rank's experts say to the rows that came: row i to `own[which[i]]`."""
        results = torch.zeros_like(arrived)
        for expert, mlp in enumerate(self.own):
            mine = which == expert
            results[mine] = mlp(arrived[mine])
        return results


class OneExpert(Mixture):
    """A rank with a single expert, for a price: no numbers are needed to find its rows."""

    def answers(self, arrived: Tensor, which: Tensor) -> Tensor:
        results = torch.zeros_like(arrived)
        results[:] = self.own[0](arrived[:])  # each [:] for a [mine] of the loop
        return results


class ExpertsDDP(nn.Module):
    """A model whose MLPs became mixtures; what all ranks have is averaged."""

    def __init__(
        self,
        model: nn.Sequential,
        experts: int,
        dispatch: Callable,
        combine: Callable,
        kind: type[Mixture] = Mixture,
    ) -> None:
        super().__init__()
        for layer in model[1:-2]:  # between the embedding and the norm
            layer.mlp = kind(layer.mlp, experts, dispatch, combine).to(model[0].weight)
            for parameter in layer.mlp.own.parameters():
                parameter.own, parameter.group = True, None  # no other rank has it
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def finish_gradient_synchronization(self) -> None:
        """The sum of all ranks, or an expert's own, over the ranks whose tokens it saw."""
        for parameter in self.parameters():
            if not hasattr(parameter, "own"):
                dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def evenly(rows: Tensor, which: Tensor, experts: int) -> tuple:
    """As `dispatch` with a perfect router, for a price: each rank gets as many rows."""
    ranks = dist.get_world_size()
    counts = [len(rows) // ranks] * ranks
    order = which.argsort(stable=True)
    return Exchange.apply(rows[order], counts, counts), which, (order, counts, counts)
