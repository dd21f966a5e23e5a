"""What f and g, and the layers by columns and by rows, must do."""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.tensor_parallel import block, layers

OTHERS = "with ranks 2 and 3 in another group,"


def _group_of(rank: int, world_size: int, size: int) -> dist.ProcessGroup:
    """The ranks are in groups of `size` neighbours."""
    groups = [dist.new_group(range(i, i + size)) for i in range(0, world_size, size)]
    return groups[rank // size]


# f and g


def _there_and_back(
    rank: int, world_size: int, operator: type, size: int, is_back: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
    """Rank r gives r + 1 in groups of `size`, and gets the gradient 10 (r + 1)."""
    mine = torch.full((2,), rank + 1.0, requires_grad=True)
    gradient = torch.full((2,), 10 * (rank + 1.0))
    output = operator.apply(mine, _group_of(rank, world_size, size))
    result = output.detach().clone()
    if is_back:
        output.backward(gradient)
    kept = bool((mine == rank + 1).all() and (gradient == 10 * (rank + 1)).all())
    return result, mine.grad, kept


def _compare(operator: type, direction: int, is_sum: bool) -> None:
    """Compare what f or g gives in forward (`direction` 0) or in backward (1)."""
    what, factor = [("output", 1.0), ("input's gradient", 10.0)][direction]
    for n in (1, 3):
        report = launch(_there_and_back, n, operator, n, is_back=direction == 1)
        for rank, found in enumerate(report.results):
            wanted = factor * (sum(range(1, n + 1)) if is_sum else rank + 1)
            who = f"rank {rank} of {n}: the {what}"
            expect(found[direction], torch.full((2,), wanted), who)


def hands_on_its_input(operator: type) -> None:
    """give every rank its own input in forward"""
    _compare(operator, 0, is_sum=False)


def sums_gradients(operator: type) -> None:
    """give every rank the sum of all ranks' gradients in backward"""
    _compare(operator, 1, is_sum=True)


def sums_its_input(operator: type) -> None:
    """give every rank the sum of all ranks' parts in forward"""
    _compare(operator, 0, is_sum=True)


def hands_on_gradients(operator: type) -> None:
    """hand the gradient on as it is in backward"""
    _compare(operator, 1, is_sum=False)


def leaves_tensors_alone(operator: type) -> None:
    """not write into the tensors that it is given"""
    for rank, found in enumerate(launch(_there_and_back, 2, operator, 2).results):
        assert found[2], f"rank {rank}: the input or the gradient has other numbers now"


def stays_in_its_group(operator: type) -> None:
    """sum over the ranks of `group` only"""
    alone = launch(_there_and_back, 2, operator, 2).results
    for rank, found in enumerate(launch(_there_and_back, 4, operator, 2).results[:2]):
        for i, what in enumerate(("output", "input's gradient")):
            expect(found[i], alone[rank][i], f"{OTHERS} rank {rank}: the {what}")


# Both layers


def _run(layer: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    output = layer(x)
    output.backward(gradient)
    return [output.detach(), x.grad, layer.weight.grad, layer.bias.grad]


def _beside_whole(
    rank: int, world_size: int, layer: type, size: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output and gradients of this rank's layer, and its shares of the whole layer's.

    The ranks are in groups of `size`, each with a layer of its own.
    """
    group = _group_of(rank, world_size, size)
    torch.manual_seed(rank // size)
    whole = nn.Linear(12, 24).double()
    x, gradient = torch.randn(2, 12).double(), torch.randn(2, 24).double()
    # how output, input, weight and bias are cut
    dims = (None, -1, 1, None) if "Row" in layer.__name__ else (-1, None, 0, 0)

    def share(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        return tensor if dim is None else tensor.chunk(size, dim)[rank % size].contiguous()

    expected = map(share, _run(deepcopy(whole), x, gradient), dims)
    found = _run(layer(whole, group), share(x, dims[1]), share(gradient, dims[0]))
    return found, list(expected)


WHAT = ("output", "input's gradient", "weight's gradient", "bias's gradient")


@cache
def _compared(layer: type, world_size: int, size: int) -> list:
    return launch(_beside_whole, world_size, layer, size).results


def _compare_layer(layer: type, places: Sequence[int], n: int, size: int) -> None:
    for rank, (found, wanted) in enumerate(_compared(layer, n, size)):
        for i in places:
            where = f"rank {rank} of {n}" if n == size else f"{OTHERS} rank {rank}"
            expect(found[i], wanted[i], f"{where}: the {WHAT[i]}", within=1e-9)


def computes_its_columns(layer: type) -> None:
    """compute this rank's columns of the whole layer's output"""
    for n in (1, 3):
        _compare_layer(layer, [0], n, n)


def computes_the_whole(layer: type) -> None:
    """give the whole layer's output on every rank"""
    for n in (1, 3):
        _compare_layer(layer, [0], n, n)


def has_its_gradients(layer: type) -> None:
    """have this rank's shares of the whole layer's gradients: input, weight and bias"""
    for n in (1, 3):
        _compare_layer(layer, [1, 2, 3], n, n)


def shares_within_its_group(layer: type) -> None:
    """be cut over the ranks of `group` only, and sum over them only"""
    _compare_layer(layer, [0, 1, 2, 3], 4, 2)


def _train(rank: int, world_size: int, layer: type | None) -> dict[str, torch.Tensor]:
    """Five steps of SGD, with None in one process; the whole parameters, on every rank."""
    one = block.new_block()
    if layer:
        setattr(block, layer.__name__, layer)  # in this rank only
        block.parallelize(one)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        block.gradients_of(one, step)
        optimizer.step()
    return {name: block.whole_of(p, p) for name, p in one.named_parameters()}


def trains_like_one(layer: type) -> None:
    """train a transformer's block as one process does, on 2 and 3 ranks"""
    one = _train(0, 1, None)
    for n in (2, 3):
        for rank, found in enumerate(launch(_train, n, layer).results):
            for name, value in found.items():
                expect(value, one[name], f"rank {rank} of {n}: `{name}`", within=1e-9)


build = Builder(
    "tensor_parallel",
    {
        layers.CopyToRanks: [
            hands_on_its_input,
            sums_gradients,
            leaves_tensors_alone,
            stays_in_its_group,
        ],
        layers.SumOverRanks: [
            sums_its_input,
            hands_on_gradients,
            leaves_tensors_alone,
            stays_in_its_group,
        ],
        layers.ColumnParallelLinear: [
            computes_its_columns,
            has_its_gradients,
            shares_within_its_group,
            trains_like_one,
        ],
        layers.RowParallelLinear: [
            computes_the_whole,
            has_its_gradients,
            shares_within_its_group,
            trains_like_one,
        ],
    },
)
