"""The builds take right answers in any dress, and no wrong one."""

from mgpu_tutorial.fully_shard.builds import build
from tests.builds import edited

BLOCKS = "for block in others:\n        fully_shard(block, **settings)"
LAST = "fully_shard(last, reshard_after_forward=False, **settings)"
ROOT = "fully_shard(model, **settings)"
KEPT = BLOCKS.replace("**settings", "reshard_after_forward=False")
PLAN = [
    (ROOT, "fully_shard(model, reshard_after_forward=False)"),
    (ROOT, "", "4 parameters stay whole on each rank"),
    (LAST, "fully_shard(last)", "all-gathers of a step: 7, expected 6"),
    (LAST, "", "as block 0 begins, whole blocks: 0 and 2, expected 0"),
    (BLOCKS, "", LAST, "", "whole blocks: 0 and 1 and 2, expected 0"),
    (BLOCKS, KEPT, "as block 1 begins, whole blocks: 0 and 1, expected 1"),
    (ROOT, "", "*others", f"{ROOT}\n    *others", "the root comes after its blocks"),
]
SYNC = "model.set_requires_gradient_sync(i == len(micro_batches) - 1)"
BACK = "(loss_of(model, tokens) / len(micro_batches)).backward()"
LOOP = "for i, tokens in enumerate(micro_batches):"
SUM = "sum(loss_of(model, tokens) for tokens in micro_batches) / len(micro_batches)"
ACCUMULATE = [
    (SYNC, "model.set_requires_gradient_sync(i + 1 == len(micro_batches))"),
    (SYNC, "pass", "in 4 parts, the calls of reduce-scatter: 16, expected 4"),
    (BACK, "loss_of(model, tokens).backward()", "(2 times as long)"),
    (SYNC, "model.set_requires_gradient_sync(False)", "Is the reduce switched on"),
    (SYNC, "model.set_requires_gradient_sync(i == 0)", "differs from that of one process"),
    (LOOP, "for tokens in micro_batches[-1:]:", SYNC, "pass", "differs from that"),
    (f"{LOOP}\n        {SYNC}\n        {BACK}", f"({SUM}).backward()")
    + ("4 micro-batches go forward before the first goes back",),
]

test_right, test_wrong = edited(
    build, {"shard_blocks": PLAN, "accumulate_gradients": ACCUMULATE}
)
