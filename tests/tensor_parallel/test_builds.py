"""Right answers in other words pass every behaviour; of wrong ones a row says why."""

from mgpu_tutorial.tensor_parallel.builds import build
from tests.builds import edited

OUTPUT, GRADIENT = "rank 0 of 3: the output", "rank 0 of 3: the input's gradient"
OTHERS = "rank 0 of 4 in groups of 2: the "
COPY, SUMMED = "x.view_as(x)", "sum_of(gradient, ctx.group)"
IN_PLACE = "dist.all_reduce(gradient, group=ctx.group); return gradient"
F = [
    (COPY, "x.clone()"),
    (COPY, "sum_of(x, group)", SUMMED, "gradient", f"{OUTPUT}: [6, 6]"),
    (SUMMED, "gradient", GRADIENT),
    (SUMMED, "sum_of(gradient)", f"{OTHERS}input's gradient"),
    (f"return {SUMMED}", IN_PLACE, "rank 0 of 3: the gradient afterwards: [60, 60]"),
]
SUM, BACK = "return sum_of(part, group)", "return gradient"
BY_HAND = "total = part.clone(); dist.all_reduce(total, group=group); return total"
G = [
    (SUM, BY_HAND, BACK, "return gradient.clone()"),
    (
        SUM,
        "part = part.clone(); dist.reduce(part, group=group, group_dst=0); return part",
        "rank 1 of 3: the output",
    ),
    (f"{BACK}, None", BACK, "incorrect number of gradients"),
    (SUM, f"ctx.group = group; {SUM}", BACK, f"return {SUMMED}", f"{GRADIENT}: [60, 60]"),
    (SUM, "dist.all_reduce(part, group=group); return part.clone()", "the input afterwards"),
]
LINEAR = "linear(self.f.apply(x, self.group), self.weight, self.bias)"
COLUMNS = [
    (
        LINEAR,
        "CopyToRanks.apply(x, self.group) @ self.weight.T"
        " + (0 if self.bias is None else self.bias)",
    ),
    ("self.f.apply(x, self.group)", "x", f"{GRADIENT} where all numbers are 1: [8, 8"),
    (LINEAR, f"SumOverRanks.apply({LINEAR}, self.group)", OUTPUT),
    (LINEAR, "torch.addmm(self.bias, self.f.apply(x, self.group), self.weight.T)")
    + ("addmm",),
    ("None if whole.bias is None else shard(whole.bias, 0, group)",)
    + ("shard(whole.bias, 0, group)", "has no attribute 'shape'"),
    ("apply(x, self.group)", "apply(x)", f"{OTHERS}input's gradient"),
]
PART = "linear(part, self.weight)"
TOTAL = f"self.g.apply({PART}, self.group)"
MAYBE = "total if self.bias is None else total + self.bias"
ROWS = [
    (PART, "part @ self.weight.T"),
    (TOTAL, "self.g.apply(linear(part, self.weight, self.bias), self.group)")
    + (MAYBE, "total", f"{OUTPUT} where all numbers are 1: [15, 15, 15"),
    (MAYBE, "total + self.bias", "TypeError: unsupported operand"),
    (MAYBE, f"CopyToRanks.apply({MAYBE}, self.group)", GRADIENT),
    (PART, "part.mm(self.weight.T)", "self must be a matrix"),
    (", self.group)", ")", f"{OTHERS}output"),
    (
        "whole.bias",
        "whole.bias.detach()",
        "rank 0 of 3: the bias's gradient where all numbers are 1: None",
    ),
]
test_right, test_wrong = edited(
    build, dict(zip(build.ours, (F, G, COLUMNS, ROWS), strict=True))
)
