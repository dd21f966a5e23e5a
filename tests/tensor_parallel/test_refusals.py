"""Unequal parts and a whole input are refused; a shard does what the whole does."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.tensor_parallel import block, layers
from mgpu_tutorial.tensor_parallel.block import PLAN, Block, parallelize, whole_of
from mgpu_tutorial.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


def cut(rank, world_size, plan):
    parallelize(Block(), plan)


def cut_layer(rank, world_size, kind, outputs, inputs):
    kind(nn.Linear(inputs, outputs))


@pytest.mark.parametrize(
    "count, given, worker, args",
    [
        (2, "'atention.qkv'", cut, ({"atention.qkv": ColumnParallelLinear},)),
        (2, "'tention.qkv'", cut, ({"tention.qkv": ColumnParallelLinear},)),
        (3, "8 features", cut_layer, (ColumnParallelLinear, 8, 9)),
        (3, "8 features", cut_layer, (RowParallelLinear, 9, 8)),
        (3, "2 features", cut_layer, (RowParallelLinear, 9, 2)),
    ],
)
def test_it_is_refused_on_every_rank(refused, count, given, worker, args):
    refused(count, ValueError(given), worker, *args)


class Conv1D(nn.Linear):
    """A square weight that is the transpose of a Linear's: the shape says nothing."""

    def forward(self, x):
        return x @ self.weight + self.bias


def cut_another(rank, world_size, kind):
    kind(Conv1D(4, 4))


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_a_layer_that_is_no_linear_is_refused_by_its_name(refused, kind):
    refused(2, TypeError("Conv1D", "transpose"), cut_another, kind)


def cut_a_tied_head(rank, world_size):
    model = nn.ModuleDict({"token": nn.Embedding(8, 4), "head": nn.Linear(4, 8)})
    model.head.weight = model.token.weight
    parallelize(model, {"head": ColumnParallelLinear})


def test_a_tie_that_would_end_is_refused(refused):
    refused(2, ValueError("`head.weight`", "`token.weight`"), cut_a_tied_head)


def multiply(rank, world_size, shape):
    RowParallelLinear(nn.Linear(8, 4))(torch.ones(shape))


@pytest.mark.parametrize("shape", [(2, 8), (2, 3), (2, 5, 8)])
def test_an_input_that_is_not_this_ranks_part_is_refused(refused, shape):
    refused(2, ValueError(f"{shape}", "part"), multiply, shape)


def beside_one_process(rank, world_size):
    """A norm before the columns, one after the rows, and between them what is alone."""
    torch.manual_seed(0)
    inner = nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.0), nn.Linear(16, 8)
    one = nn.Sequential(nn.LayerNorm(8), *inner, nn.LayerNorm(8), nn.Softmax(-1)).double()
    plan = {"1": ColumnParallelLinear, "4": RowParallelLinear}
    shared, x = (
        parallelize(deepcopy(one), plan),
        torch.linspace(-1, 1, 24).view(3, 8).double(),
    )
    return largest_difference(shared(x), one(x))


def test_norms_around_columns_and_rows_are_right(ranks):
    assert max(ranks(2, beside_one_process).results) < 1e-14


def of_a_layer(rank, world_size, kind, dtype, bias, frozen):
    """A layer twice in a row: output and gradients, put together, and those of the whole."""
    torch.manual_seed(0)
    whole = nn.Linear(12, 24, bias, dtype=dtype)
    if frozen:
        whole.weight.requires_grad_(False)
    layer, x = kind(deepcopy(whole)), torch.randn(2, 12, dtype=dtype)
    part = x.chunk(world_size, -1)[rank] if kind is RowParallelLinear else x
    for _ in range(2):
        output, expected = layer(part), whole(x)
        if output.requires_grad:
            output.square().sum().backward()
            expected.square().sum().backward()
    if kind is ColumnParallelLinear:
        expected = expected.chunk(world_size, -1)[rank]
    pairs = [(output.detach(), expected.detach())]
    for name, parameter in layer.named_parameters():
        one = whole.get_parameter(name)
        assert parameter.requires_grad == one.requires_grad and parameter.dtype == dtype
        if parameter.requires_grad:
            pairs.append((whole_of(parameter.grad, parameter), one.grad))
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "count, dtype, bias",
    [(1, torch.float64, True), (3, torch.float64, False), (2, torch.float16, True)]
    + [(2, torch.bfloat16, False)],
)
def test_a_layer_is_the_whole_one(ranks, count, dtype, bias, frozen, kind):
    far = max(ranks(count, of_a_layer, kind, dtype, bias, frozen).results)
    assert far < (1e-14 if dtype == torch.float64 else 2e-2)


def turned(rank, world_size):
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    other = x.T.contiguous() if rank else x.T  # the same numbers, in another order in memory
    both = [layers.sum_of(other.detach()), layers.SumOverRanks.apply(other)]
    layers.CopyToRanks.apply(x).T.square().sum().backward()
    return [*both, x.grad]


def test_a_part_may_lie_in_any_order_in_memory(ranks):
    x = torch.arange(6.0).view(2, 3)
    for found in ranks(2, turned).results:
        assert largest_difference(found, [2 * x.T, 2 * x.T, 4 * x]) == 0


def odd_sums(rank, world_size):
    parts = torch.zeros(0, 3), torch.tensor(3), torch.tensor([1, 2]), torch.ones(2).half()
    return [layers.sum_of(part) for part in parts]


def test_a_part_may_be_empty_a_number_whole_or_short(ranks):
    numbers = torch.tensor(6), torch.tensor([2, 4]), 2 * torch.ones(2).half()
    for found in ranks(2, odd_sums).results:
        torch.testing.assert_close(found, [torch.zeros(0, 3), *numbers])


def frozen_attention(rank, world_size):
    """A block whose attention is frozen: which parameters are trained, and the others'."""
    model = block.new_block()
    model.attention.requires_grad_(False)
    one = deepcopy(model)
    parallelize(model, PLAN)
    block.gradients_of(model)
    block.gradients_of(one)
    far = {}
    for name, parameter in model.named_parameters():
        whole = one.get_parameter(name)
        assert (parameter.grad is None) == (whole.grad is None), name
        if whole.grad is not None:
            far[name] = largest_difference(whole_of(parameter.grad, parameter), whole.grad)
    return far


def test_what_was_frozen_stays_frozen(ranks):
    for far in ranks(2, frozen_attention).results:
        assert len(far) == 8 and max(far.values()) < 1e-14


def in_another_group(rank, world_size, call):
    groups = [dist.new_group([r]) for r in range(world_size)]
    return call(groups[1 - rank])


@pytest.mark.parametrize(
    "call",
    [
        lambda group: layers.SumOverRanks.apply(torch.ones(1), group),
        lambda group: ColumnParallelLinear(nn.Linear(4, 4), group),
    ],
)
def test_a_group_without_this_rank_is_refused(refused, call):
    """torch's calls would return at once, and leave each rank with its own part."""
    refused(2, ValueError("rank", "group"), in_another_group, call, sent=True)


def cut_a_perceptron_in_a_row(rank, world_size):
    """Columns in an inner Sequential, rows in the one around it."""
    model = nn.Sequential()
    model.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    model.down = nn.Linear(8, 4)
    one = deepcopy(model.double())
    parallelize(model, {"inner.0": ColumnParallelLinear, "down": RowParallelLinear})
    x = torch.arange(8.0, dtype=torch.float64).view(2, 4)
    return largest_difference(model(x), one(x))


def test_rows_may_stand_around_the_columns(ranks):
    assert max(ranks(2, cut_a_perceptron_in_a_row).results) < 1e-14


def one_step(rank, world_size):
    block.gradients_of(parallelize(block.new_block(), PLAN))


def test_a_block_sends_four_sums_and_no_more(ranks):
    """Cutting sends nothing; g sums twice in forward, and f twice in backward."""
    report = ranks(2, one_step, trace=True)
    assert [e.op for e in report.events if e.rank == 0] == ["all_reduce"] * 4


def cut_on_one_rank(rank, world_size):
    model = nn.ModuleDict({"token": nn.Embedding(8, 4), "head": nn.Linear(4, 8)})
    model.head.weight = model.token.weight
    model.head = ColumnParallelLinear(model.head)
    return model.head.weight is model.token.weight


def test_on_one_rank_a_tie_lasts_so_that_a_proof_sees_where_it_ends(ranks):
    assert ranks(1, cut_on_one_rank).results == [True]
