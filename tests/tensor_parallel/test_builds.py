"""Right answers in other words pass every behaviour; of wrong ones a row says why."""

from mgpu_tutorial.tensor_parallel.builds import build
from tests.builds import Right, Wrong, edited

OUTPUT, GRADIENT = "rank 0 of 3: the output", "rank 0 of 3: the input's gradient"
OTHERS = "rank 0 of 4 in groups of 2: the "
COPY, SUMMED = "x.view_as(x)", "sum_of(gradient, ctx.group)"
IN_PLACE = "dist.all_reduce(gradient, group=ctx.group); return gradient"
F = [
    Right("CopyToRanks", replace={COPY: "x.clone()"}),
    Wrong(
        "CopyToRanks",
        replace={COPY: "sum_of(x, group)", SUMMED: "gradient"},
        says=f"{OUTPUT}: [6, 6]",
    ),
    Wrong("CopyToRanks", replace={SUMMED: "gradient"}, says=GRADIENT),
    Wrong(
        "CopyToRanks", replace={SUMMED: "sum_of(gradient)"}, says=f"{OTHERS}input's gradient"
    ),
    Wrong(
        "CopyToRanks",
        replace={f"return {SUMMED}": IN_PLACE},
        says="rank 0 of 3: the gradient afterwards: [60, 60]",
    ),
]
SUM, BACK = "return sum_of(part, group)", "return gradient"
BY_HAND = "total = part.clone(); dist.all_reduce(total, group=group); return total"
G = [
    Right("SumOverRanks", replace={SUM: BY_HAND, BACK: "return gradient.clone()"}),
    Wrong(
        "SumOverRanks",
        replace={
            SUM: "part = part.clone(); dist.reduce(part, group=group, group_dst=0); "
            "return part"
        },
        says="rank 1 of 3: the output",
    ),
    Wrong(
        "SumOverRanks", replace={f"{BACK}, None": BACK}, says="incorrect number of gradients"
    ),
    Wrong(
        "SumOverRanks",
        replace={SUM: f"ctx.group = group; {SUM}", BACK: f"return {SUMMED}"},
        says=f"{GRADIENT}: [60, 60]",
    ),
    Wrong(
        "SumOverRanks",
        replace={SUM: "dist.all_reduce(part, group=group); return part.clone()"},
        says="the input afterwards",
    ),
]
LINEAR = "linear(self.f.apply(x, self.group), self.weight, self.bias)"
COLUMNS = [
    Right(
        "ColumnParallelLinear",
        replace={
            LINEAR: "CopyToRanks.apply(x, self.group) @ self.weight.T"
            " + (0 if self.bias is None else self.bias)"
        },
    ),
    Wrong(
        "ColumnParallelLinear",
        replace={"self.f.apply(x, self.group)": "x"},
        says=f"{GRADIENT} where all numbers are 1: [8, 8",
    ),
    Wrong(
        "ColumnParallelLinear",
        replace={LINEAR: f"SumOverRanks.apply({LINEAR}, self.group)"},
        says=OUTPUT,
    ),
    Wrong(
        "ColumnParallelLinear",
        replace={
            LINEAR: "torch.addmm(self.bias, self.f.apply(x, self.group), self.weight.T)"
        },
        says="addmm",
    ),
    Wrong(
        "ColumnParallelLinear",
        replace={
            "None if whole.bias is None else shard(whole.bias, 0, group)": ""
            "shard(whole.bias, 0, group)"
        },
        says="has no attribute 'shape'",
    ),
    Wrong(
        "ColumnParallelLinear",
        replace={"apply(x, self.group)": "apply(x)"},
        says=f"{OTHERS}input's gradient",
    ),
]
PART = "linear(part, self.weight)"
TOTAL = f"self.g.apply({PART}, self.group)"
BIAS = "self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach().clone())"
MAYBE = "total if self.bias is None else total + self.bias"
ROWS = [
    Right("RowParallelLinear", replace={PART: "part @ self.weight.T"}),
    Wrong(
        "RowParallelLinear",
        replace={
            TOTAL: "self.g.apply(linear(part, self.weight, self.bias), self.group)",
            MAYBE: "total",
        },
        says=f"{OUTPUT} where all numbers are 1: [15, 15, 15",
    ),
    Wrong(
        "RowParallelLinear",
        replace={MAYBE: "total + self.bias"},
        says="TypeError: unsupported operand",
    ),
    Wrong(
        "RowParallelLinear",
        replace={MAYBE: f"CopyToRanks.apply({MAYBE}, self.group)"},
        says=GRADIENT,
    ),
    Wrong(
        "RowParallelLinear",
        replace={PART: "part.mm(self.weight.T)"},
        says="self must be a matrix",
    ),
    Wrong("RowParallelLinear", replace={", self.group)": ")"}, says=f"{OTHERS}output"),
    Wrong(
        "RowParallelLinear",
        replace={"whole.bias": "whole.bias.detach()"},
        says="the bias's gradient where all numbers are 1: None. Nothing came back",
    ),
    Wrong(
        "RowParallelLinear",
        replace={"self.bias = whole.bias": BIAS},
        says="the bias's requires_grad, with a frozen bias: True, expected False",
    ),
]
test_right, test_wrong = edited(build, [*F, *G, *COLUMNS, *ROWS])
