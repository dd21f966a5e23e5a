"""Right answers in other words pass every behaviour; of wrong ones a row says why."""

from mgpu_tutorial.tensor_parallel_in_practice.builds import build
from tests.builds import right_and_wrong

MAX = "dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)"
TOTAL = "total = SumOverRanks.apply(shifted.exp().sum(-1), group)"
RIGHT_LOGIT = "right = SumOverRanks.apply(mine, group)"
MEAN = "(total.log() - right).mean()"


def loss(maximum=MAX, total=TOTAL, right=RIGHT_LOGIT, result=MEAN, hide=".where(here, 0)"):
    return f"""
import torch
import torch.distributed as dist
from mgpu_tutorial.tensor_parallel.layers import CopyToRanks, SumOverRanks, sum_of

def parallel_cross_entropy(logits, targets, group=None):
    local = targets - dist.get_rank(group) * logits.shape[-1]
    here = (local >= 0) & (local < logits.shape[-1])
    index = local.where(here, 0).unsqueeze(-1)
    largest = logits.detach().amax(-1)
    {maximum}
    shifted = logits - largest.unsqueeze(-1)
    {total}
    mine = shifted.gather(-1, index).squeeze(-1) {hide}
    {right}
    return {result}
"""


RIGHT = [
    loss(),
    loss(hide=".masked_fill(~here, 0)"),
    loss(total="total = shifted.exp().sum(-1); dist.all_reduce(total, group=group)"),
    loss(  # both sums in one call
        total="mine = shifted.gather(-1, index).squeeze(-1).where(here, 0)",
        right="both = torch.stack([shifted.exp().sum(-1), mine]); "
        "total, right = SumOverRanks.apply(both, group)",
    ),
]
WRONG = [
    (loss(maximum="pass"), "rank 0 of 2: the loss"),
    (loss(total="total = shifted.exp().sum(-1)"), "rank 0 of 2: the loss"),
    (loss(right="right = mine"), "rank 0 of 2: the loss"),
    (loss(hide=""), "rank 0 of 2: the loss"),
    (loss(result="(total.log() - right).sum()"), "rank 0 of 1: the loss"),
    (
        loss(total="total = sum_of(shifted.detach().exp().sum(-1), group)"),
        "the logits' gradient",
    ),
    (loss(maximum="largest = torch.zeros_like(largest)"), "[inf]"),
    (loss(hide="* here"), "rank 0 of 3: the loss: [nan]"),
    (
        loss(right="right = SumOverRanks.apply(mine)"),
        "with ranks 2 and 3 in another group, rank 0: the loss",
    ),
    (
        loss(total=f"{TOTAL}; total = CopyToRanks.apply(total, group)"),
        "rank 0 of 2: the logits' gradient",
    ),
    (
        loss(maximum=f"{MAX}; dist.all_reduce(logits.detach().clone())"),
        "rank 0 sends 7 numbers per token",
    ),
]


test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG)
