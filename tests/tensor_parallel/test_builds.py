"""Right answers in other words pass every behaviour; of wrong ones a row says why."""

from mgpu_tutorial.tensor_parallel.builds import build
from tests.builds import right_and_wrong

IMPORTS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear
from mgpu_tutorial.tensor_parallel.layers import shard, sum_of
"""


def operator(name, forward, backward):
    return f"""{IMPORTS}
class {name}(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group=None):
        ctx.group = group
        {forward}

    @staticmethod
    def backward(ctx, gradient):
        {backward}
"""


def f(forward, backward):
    return operator("CopyToRanks", forward, backward)


def g(forward, backward):
    return operator("SumOverRanks", forward, backward)


def columns(dim, forward, bias="shard(whole.bias, 0, group)"):
    return layer("ColumnParallelLinear", dim, forward, bias)


def rows(dim, forward, bias="whole.bias"):
    return layer("RowParallelLinear", dim, forward, bias)


def layer(name, dim, forward, bias):
    return f"""{IMPORTS}
from mgpu_tutorial.tensor_parallel.layers import CopyToRanks, SumOverRanks
class {name}(nn.Module):
    def __init__(self, whole, group=None):
        super().__init__()
        self.weight = shard(whole.weight, {dim}, group)
        self.bias = {bias}
        self.group = group

    def forward(self, x):
        {forward}
"""


SUM = "total = x.clone(); dist.all_reduce(total, group=group); return total"
RIGHT = [
    f("return x.clone()", "return sum_of(gradient, ctx.group), None"),
    g(SUM, "return gradient.clone(), None"),
    columns(0, "return CopyToRanks.apply(x, self.group) @ self.weight.T + self.bias"),
    rows(1, "return SumOverRanks.apply(x @ self.weight.T, self.group) + self.bias"),
]
WRONG = [
    (
        f("return sum_of(x, group)", "return gradient, None"),
        "rank 0 of 2: the output: [3, 3]",
    ),
    (f("return x.clone()", "return gradient, None"), "rank 0 of 2: the input's gradient"),
    (
        f("return x.clone()", "return sum_of(gradient), None"),
        "with ranks 2 and 3 in another group, rank 0: the input's gradient",
    ),
    (
        f(
            "return x.clone()",
            "dist.all_reduce(gradient, group=ctx.group); return gradient, None",
        ),
        "the input or the gradient has other numbers now",
    ),
    (
        f(
            "return x.clone()",
            "return sum_of(gradient, ctx.group) / dist.get_world_size(), None",
        ),
        "rank 0 of 2: the input's gradient",
    ),
    (g("return x.clone()", "return gradient, None"), "rank 0 of 2: the output"),
    (
        g("return sum_of(x, group)", "return sum_of(gradient, ctx.group), None"),
        "rank 0 of 2: the input's gradient: [30, 30]",
    ),
    (
        g("dist.all_reduce(x, group=group); return x.view_as(x)", "return gradient, None"),
        "now",
    ),
    (
        columns(0, "return linear(x, self.weight, self.bias)"),
        "rank 0 of 2: the input's gradient",
    ),
    (
        columns(1, "return linear(CopyToRanks.apply(x, self.group), self.weight, self.bias)"),
        "mat1 and mat2",
    ),
    (
        columns(
            0,
            "y = linear(CopyToRanks.apply(x, self.group), self.weight, self.bias); "
            "return SumOverRanks.apply(y, self.group)",
        ),
        "rank 0 of 2: the output",
    ),
    (
        rows(1, "return SumOverRanks.apply(linear(x, self.weight, self.bias), self.group)"),
        "rank 0 of 2: the output",
    ),
    (rows(1, "return linear(x, self.weight, self.bias)"), "rank 0 of 2: the output"),
    (
        rows(
            1,
            "y = SumOverRanks.apply(linear(x, self.weight), self.group) + self.bias; "
            "return CopyToRanks.apply(y, self.group)",
        ),
        "rank 0 of 2: the input's gradient",
    ),
    (
        columns(0, "return CopyToRanks.apply(x) @ self.weight.T + self.bias"),
        "with ranks 2 and 3 in another group, rank 0: the input's gradient",
    ),
    (
        rows(1, "return SumOverRanks.apply(x @ self.weight.T) + self.bias"),
        "with ranks 2 and 3 in another group, rank 0: the output",
    ),
    (
        rows(
            1,
            "return SumOverRanks.apply(x @ self.weight.T, self.group) + self.bias",
            bias="whole.bias.detach()",
        ),
        "rank 0 of 1: the bias's gradient: None",
    ),
]


test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG)


def test_forward_is_not_blamed_for_backward(cell):
    rows = build.rows(*cell(g("return sum_of(x, group)", "return gradient")))
    assert [row.holds for row in rows] == [True, False, None, None]
