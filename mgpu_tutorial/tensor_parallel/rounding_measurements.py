"""Only measures: how far rounding alone may carry a run in pieces from one process.

A sum of rounded numbers depends on its order. One process adds up the same products in pieces
as t ranks would, but shares the features out at random: whatever differs then is rounding.
How far the gradients of many such runs lie from the plain run is the band in which a run on
ranks must lie as well.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from mgpu_tutorial.lab import Table, launch
from mgpu_tutorial.shared.models import MLP, Attention, SmallTransformer
from mgpu_tutorial.tensor_parallel.training import (
    Prepared,
    Way,
    flat_cross_entropy,
    loss_and_gradients,
    new_model,
    whole,
    whole_gradients,
)

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class SummedMLP(nn.Module):
    """An MLP that adds up the parts of some groups of features, rounding after each."""

    def __init__(self, mlp: MLP, groups: list[torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.groups = mlp.up, mlp.down, groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = self.up, self.down
        parts = [
            linear(gelu(linear(x, up.weight[g], up.bias[g])), down.weight[:, g])
            for g in self.groups
        ]
        return sum(parts) + down.bias


class SummedAttention(nn.Module):
    """Attention that adds up the parts of some groups of heads, rounding after each."""

    def __init__(self, attention: Attention, groups: list[torch.Tensor]) -> None:
        super().__init__()
        self.query, self.key = attention.query, attention.key
        self.value, self.out = attention.value, attention.out
        self.per_head = attention.per_head
        columns = torch.arange(attention.query.out_features).view(-1, self.per_head)
        self.groups = [columns[heads].flatten() for heads in groups]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = []
        for g in self.groups:
            q, k, v = (
                linear(x, whole.weight[g]).unflatten(-1, (-1, self.per_head)).transpose(1, 2)
                for whole in (self.query, self.key, self.value)
            )
            mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
            parts.append(linear(mixed.transpose(1, 2).flatten(-2), self.out.weight[:, g]))
        return sum(parts)


class ReorderedHead(nn.Module):
    """A head whose tokens are computed in groups, and put back in their order."""

    def __init__(self, head: nn.Linear, groups: list[torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.groups = head.weight, groups
        self.back = torch.cat(groups).argsort()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = torch.cat([linear(x, self.weight[g]) for g in self.groups], -1)
        return logits[..., self.back]


def reordered(model: SmallTransformer, pieces: int, seed: int) -> Prepared:
    """The same model in one process, with its sums in pieces and in a random order."""
    generator = torch.Generator().manual_seed(seed)

    def share_out(many: int) -> list[torch.Tensor]:
        return list(torch.randperm(many, generator=generator).tensor_split(pieces))

    for block in model.blocks:
        heads = block.attention.query.out_features // block.attention.per_head
        block.attention = SummedAttention(block.attention, share_out(heads))
        block.mlp = SummedMLP(block.mlp, share_out(block.mlp.up.out_features))
    model.head = ReorderedHead(model.head, share_out(model.head.out_features))
    return Prepared(model, flat_cross_entropy)


def gradients(prepared: Prepared) -> torch.Tensor:
    """All gradients of the first batch side by side, as float64; the same on every rank."""
    loss_and_gradients(prepared)
    return torch.cat([g.flatten() for g in whole_gradients(prepared.model).values()]).double()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How long the difference is, in shares of what is expected."""
    return ((found - expected).norm() / expected.norm()).item()


class Runs(NamedTuple):
    """In one dtype: the gradients of the plain run, and how far off each random order is."""

    plain: torch.Tensor
    orders: list[float]


def band(
    rank: int, world_size: int, pieces: tuple[int, ...] = (2, 4), orders: int = 8
) -> dict[str, Runs]:
    """One process adds up in so many pieces, in as many random orders each, in each dtype."""
    found = {}
    for name, dtype in DTYPES.items():
        plain = gradients(whole(new_model(dtype)))
        runs = [
            gradients(reordered(new_model(dtype), count, seed))
            for count in pieces
            for seed in range(orders)
        ]
        found[name] = Runs(plain, [distance(run, plain) for run in runs])
    return found


def distances(
    rank: int, world_size: int, ways: dict[str, Way], plain: dict[str, torch.Tensor]
) -> dict[str, dict[str, float]]:
    """How far the gradients of each way lie from those of one process, in each dtype."""
    return {
        name: {
            dtype: distance(gradients(way(new_model(DTYPES[dtype]))), plain[dtype])
            for dtype in DTYPES
        }
        for name, way in ways.items()
    }


class Band(NamedTuple):
    """How far the random orders lie from one process, by dtype; and some ways, by name."""

    orders: dict[str, list[float]]
    ways: dict[str, dict[str, float]]

    def limit(self, dtype: str) -> float:
        """Beyond this it is no rounding: twice the farthest of the random orders."""
        return 2 * max(self.orders[dtype])


def verdicts(band: Band) -> Table:
    """The band's end; of each way how far it lies in each precision, and whether inside."""
    rows = [["the band ends at", *(f"{band.limit(dtype):.1e}" for dtype in band.orders)]]
    for name, found in band.ways.items():
        sides = ["inside" if off <= band.limit(d) else "outside" for d, off in found.items()]
        cells = zip(found.values(), sides, strict=True)
        rows.append([name, *(f"{off:.1e} {side}" for off, side in cells)])
    return Table(["gradients off", *band.orders], rows)


def measure(ways: dict[str, tuple[int, Way]]) -> Band:
    """Launch one process for the band, and each way on so many ranks."""
    runs = launch(band, 1).results[0]
    plain = {name: one.plain for name, one in runs.items()}
    found: dict[str, dict[str, float]] = {}
    for count in {ranks for ranks, _ in ways.values()}:
        same = {name: way for name, (ranks, way) in ways.items() if ranks == count}
        found |= launch(distances, count, same, plain).results[0]
    orders = {name: one.orders for name, one in runs.items()}
    return Band(orders, {name: found[name] for name in ways})
