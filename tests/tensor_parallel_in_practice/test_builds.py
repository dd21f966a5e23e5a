"""Right answers in other words pass every behaviour; of wrong ones a row says why."""

from mgpu_tutorial.tensor_parallel_in_practice.builds import build
from tests.builds import Right, Wrong, edited

LOSS, GRADIENT = "rank 0 of 3: the loss", "rank 0 of 3: the logits' gradient"
MAX = "dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)"
SUM, TOTAL = "SumOverRanks.apply(shifted.exp().sum(-1), group)", "total = SumOverRanks"
RIGHT, HIDE, MEAN = "SumOverRanks.apply(mine, group)", ".where(here, 0)\n    right", ".mean()"
COUNTED, REFUSE = "[targets != -100]", "if len(unknown):"
UNKNOWN = "(targets < 0) & (targets != -100) | (targets >= size)"
OTHER_IMPORT = "from mgpu_tutorial.tensor_parallel.layers import"
GATHER = "shifted.gather(-1, index).squeeze(-1).where(here, 0)"
BY_PRODUCT = """nn.functional.one_hot(index.squeeze(-1), logits.shape[-1]).to(shifted)
    mine = (shifted.where(shifted > -1e30, 0).unsqueeze(-2) @ mine.unsqueeze(-1))
    mine = mine.flatten(-3).where(here, 0)"""
CROSS_ENTROPY = [
    Right(
        "parallel_cross_entropy",
        replace={
            HIDE: ".masked_fill(~here, 0)\n    right",
            SUM: "shifted.exp().sum(-1); dist.all_reduce(total, group=group)",
        },
    ),
    Wrong("parallel_cross_entropy", replace={MAX: "pass"}, says=LOSS),
    Wrong(
        "parallel_cross_entropy",
        replace={"logits.detach().amax": "logits.amax"},
        says="(does one flow through the maximum? It needs none): [nan",
    ),
    Wrong("parallel_cross_entropy", replace={RIGHT: "mine"}, says=LOSS),
    Wrong("parallel_cross_entropy", replace={HIDE: "\n    right"}, says=LOSS),
    Wrong("parallel_cross_entropy", replace={MEAN: ".sum()"}, says="rank 0 of 1: the loss"),
    Wrong(
        "parallel_cross_entropy",
        replace={
            TOTAL: f"{OTHER_IMPORT} sum_of\n    {TOTAL}",
            SUM: "sum_of(shifted.detach().exp().sum(-1), group)",
        },
        says="the logits' gradient",
    ),
    Wrong(
        "parallel_cross_entropy",
        replace={MAX: "largest = torch.zeros_like(largest)"},
        says="[inf]",
    ),
    Wrong(
        "parallel_cross_entropy",
        replace={MAX: MAX.replace(", group=group", "")},
        says="rank 0 of 4 in groups of 2: the loss",
    ),
    Wrong(
        "parallel_cross_entropy",
        replace={HIDE: " * here\n    right"},
        says="rank 0 of 3: the loss: [nan]",
    ),
    Wrong(
        "parallel_cross_entropy",
        replace={RIGHT: "SumOverRanks.apply(mine)"},
        says="rank 0 of 4 in groups of 2: the loss",
    ),
    Wrong(
        "parallel_cross_entropy",
        replace={
            TOTAL: f"{OTHER_IMPORT} CopyToRanks\n    {TOTAL}",
            SUM: f"CopyToRanks.apply({SUM}, group)",
        },
        says=GRADIENT,
    ),
    Wrong("parallel_cross_entropy", replace={COUNTED: ""}, says="rank 0 of 1: the loss"),
    Wrong(
        "parallel_cross_entropy",
        replace={REFUSE: "if False:"},
        says="target 12 of 12, rank 0: no error",
    ),
    Wrong(
        "parallel_cross_entropy",
        replace={UNKNOWN: "targets >= size"},
        says="target -1 of 12, rank 0: no error",
    ),
    Wrong(
        "parallel_cross_entropy",
        replace={GATHER: BY_PRODUCT},
        says="2 ranks in bfloat16 autocast: ",
    ),
    Wrong(
        "parallel_cross_entropy",
        replace={"logits = logits.float()": "pass"},
        says="2 ranks in bfloat16 autocast: ",
    ),
    Wrong(
        "parallel_cross_entropy",
        replace={MAX: f"{MAX}; dist.all_reduce(logits.detach().clone())"},
        says="rank 0 sends 7 numbers per token",
    ),
]
test_right, test_wrong = edited(build, CROSS_ENTROPY)
