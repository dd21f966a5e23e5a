"""What f and g, and the layers by columns and by rows, must do."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.tensor_parallel import block, layers

Rows = list[tuple[str, torch.Tensor, torch.Tensor]]  # of what: found, and expected


def compare(
    worker: Callable[..., Rows], *args: Any, groups: Sequence = ((1, 1), (3, 3), (4, 2))
) -> None:
    """Launch `worker` on n ranks in groups of some size, and compare what each rank found."""
    for n, size in groups:
        where = f"of {n}" if size == n else f"of {n} in groups of {size}"
        for row in zip(*launch(worker, n, *args, size).results, strict=True):
            for rank, (what, found, expected) in enumerate(row):
                expect(found, expected, f"rank {rank} {where}: the {what}", within=1e-9)


# f and g


def _apply(
    rank: int, world_size: int, operator: type, is_back: bool, is_sum: bool, size: int
) -> Rows:
    """Rank r gives r + 1 and, with `is_back`, gets the gradient 10 (r + 1)."""
    group, _ = dist.new_subgroups(size)
    given = torch.full((2,), rank + 1.0)
    x, gradient = given.clone().requires_grad_(), 10 * given
    what, found, unit = "output", operator.apply(x, group), 1
    if is_back:
        found.backward(gradient)
        what, found, unit = "input's gradient", x.grad, 10
    ranks = dist.get_process_group_ranks(group) if is_sum else [rank]
    expected = torch.full((2,), unit * sum(r + 1.0 for r in ranks))
    rows = [(what, found, expected), ("input afterwards", x, given)]
    return [*rows, ("gradient afterwards", gradient, 10 * given)]


def hands_on_its_input(f: type) -> None:
    """give every rank its own input in forward"""
    compare(_apply, f, False, False)


def sums_gradients(f: type) -> None:
    """give every rank the sum of its group's gradients in backward, without changing them"""
    compare(_apply, f, True, True)


def sums_its_input(g: type) -> None:
    """give every rank the sum of its group's parts in forward, without changing them"""
    compare(_apply, g, False, True)


def hands_on_gradients(g: type) -> None:
    """hand the gradient on as it is in backward"""
    compare(_apply, g, True, False)


# Both layers


def _run(layer: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    output = layer(x)
    output.backward(gradient)
    bias = [] if layer.bias is None else [layer.bias.grad]
    return [output, x.grad, layer.weight.grad, *bias]


def _beside_whole(
    rank: int, world_size: int, layer: type, bias: bool, ones: bool, size: int
) -> Rows:
    """This rank's layer, and its shares of a whole one, which each group has of its own.

    With `ones` all numbers are 1, so what comes out is a count; else they are whole.
    """
    group, _ = dist.new_subgroups(size)
    torch.manual_seed(rank // size)
    whole = nn.Linear(12, 24, bias).double()
    x, gradient = torch.empty(2, 12).double(), torch.empty(2, 24).double()
    for tensor in (*whole.parameters(), x, gradient):
        tensor.data.fill_(1) if ones else tensor.data.random_(-9, 10)
    # how output, input, weight and bias are cut
    dims = (None, -1, 1, None) if "Row" in layer.__name__ else (-1, None, 0, 0)

    def share(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        return tensor if dim is None else tensor.chunk(size, dim)[rank % size]

    expected = map(share, _run(deepcopy(whole), x, gradient), dims)
    found = _run(layer(whole, group), share(x, dims[1]), share(gradient, dims[0]))
    names = ["output", "input's gradient", "weight's gradient", "bias's gradient"]
    if ones:
        names = [f"{name} where all numbers are 1" for name in names]
    if not bias:
        names = [f"{name} without a bias" for name in names[:3]]
    return list(zip(names, found, expected, strict=True))


def has_its_columns(layer: type) -> None:
    """compute this rank's columns of the group's output, and its shares of the gradients"""
    compare(_beside_whole, layer, True, True, groups=[(3, 3)])
    compare(_beside_whole, layer, True, False)


def has_the_sum(layer: type) -> None:
    """give every rank the group's whole output, and its shares of the gradients"""
    compare(_beside_whole, layer, True, True, groups=[(3, 3)])
    compare(_beside_whole, layer, True, False)


def needs_no_bias(layer: type) -> None:
    """do the same for a layer without a bias"""
    compare(_beside_whole, layer, False, False, groups=[(2, 2)])


def _freeze(rank: int, world_size: int, layer: type, size: int) -> Rows:
    """Which parameters are trained if one of the whole layer's is frozen."""
    rows = []
    for frozen in "weight", "bias":
        whole = nn.Linear(12, 24)
        whole.get_parameter(frozen).requires_grad = False
        made = layer(whole)
        rows += [
            (
                f"{name}'s requires_grad, with a frozen {frozen}",
                p.requires_grad,
                name != frozen,
            )
            for name, p in made.named_parameters()
        ]
    return rows


def stays_frozen(layer: type) -> None:
    """leave frozen what is frozen, and train the rest"""
    compare(_freeze, layer, groups=[(2, 2)])


def _train(rank: int, world_size: int, layer: type, size: int) -> Rows:
    """Five steps of SGD with a shared block and with a whole one; their parameters."""
    group, _ = dist.new_subgroups(size)
    cut_by_it = [n for n, kind in block.PLAN.items() if kind.__name__ == layer.__name__]
    plan = block.PLAN | dict.fromkeys(cut_by_it, layer)
    shared, one = block.parallelize(block.new_block(), plan, group), block.new_block()
    for model in (shared, one):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            optimizer.zero_grad()
            block.gradients_of(model, step)
            optimizer.step()
    found = shared.named_parameters()
    return [(f"`{n}`", block.whole_of(p, p), one.get_parameter(n)) for n, p in found]


def trains_like_one(layer: type) -> None:
    """train a transformer's block as one process does, on 2 and 3 ranks"""
    compare(_train, layer, groups=((3, 3), (4, 2)))


build = Builder(
    "tensor_parallel",
    {
        layers.CopyToRanks: [hands_on_its_input, sums_gradients],
        layers.SumOverRanks: [sums_its_input, hands_on_gradients],
        layers.ColumnParallelLinear: [
            has_its_columns,
            needs_no_bias,
            stays_frozen,
            trains_like_one,
        ],
        layers.RowParallelLinear: [has_the_sum, needs_no_bias, stays_frozen, trains_like_one],
    },
)
