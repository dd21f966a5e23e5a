"""Right answers in other words pass every behaviour; of wrong ones a row says why."""

from mgpu_tutorial.tensor_parallel_in_practice.builds import build
from tests.builds import edited

LOSS, GRADIENT = "rank 0 of 3: the loss", "rank 0 of 3: the logits' gradient"
MAX = "dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)"
SUM, TOTAL = "SumOverRanks.apply(shifted.exp().sum(-1), group)", "total = SumOverRanks"
RIGHT, HIDE, MEAN = "SumOverRanks.apply(mine, group)", ".where(here, 0)\n    right", ".mean()"
COUNTED, REFUSE = "[targets != IGNORED]", "require_targets(logits, targets, group)"
OTHER_IMPORT = "from mgpu_tutorial.tensor_parallel.layers import"
CROSS_ENTROPY = [
    (HIDE, ".masked_fill(~here, 0)\n    right")
    + (SUM, "shifted.exp().sum(-1); dist.all_reduce(total, group=group)"),
    (MAX, "pass", LOSS),
    (RIGHT, "mine", LOSS),
    (HIDE, "\n    right", LOSS),
    (MEAN, ".sum()", "rank 0 of 1: the loss"),
    (TOTAL, f"{OTHER_IMPORT} sum_of\n    {TOTAL}")
    + (SUM, "sum_of(shifted.detach().exp().sum(-1), group)", "the logits' gradient"),
    (MAX, "largest = torch.zeros_like(largest)", "[inf]"),
    (MAX, MAX.replace(", group=group", ""), "rank 0 of 4 in groups of 2: the loss"),
    (HIDE, " * here\n    right", "rank 0 of 3: the loss: [nan]"),
    (RIGHT, "SumOverRanks.apply(mine)", "rank 0 of 4 in groups of 2: the loss"),
    (TOTAL, f"{OTHER_IMPORT} CopyToRanks\n    {TOTAL}")
    + (SUM, f"CopyToRanks.apply({SUM}, group)", GRADIENT),
    (COUNTED, "", "rank 0 of 1: the loss"),
    (REFUSE, "pass", "target 12 of 12, rank 0: no error"),
    (REFUSE, "assert targets.max() < logits.shape[-1] * dist.get_world_size(group)")
    + ("target -1 of 12, rank 0: no error",),
    (MAX, f"{MAX}; dist.all_reduce(logits.detach().clone())")
    + ("rank 0 sends 7 numbers per token",),
]
test_right, test_wrong = edited(build, {"parallel_cross_entropy": CROSS_ENTROPY})
