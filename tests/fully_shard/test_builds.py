"""The builds take right answers in any dress, and no wrong one."""

from mgpu_tutorial.fully_shard.builds import build
from tests.builds import edited

BLOCKS = "for block in others:\n        fully_shard(block, **settings)"
LAST = "fully_shard(last, reshard_after_forward=False, **settings)"
ROOT = "fully_shard(model, **settings)"
KEPT = BLOCKS.replace("**settings", "reshard_after_forward=False")
AGAIN = "fully_shard(model, reshard_after_forward=True)"
POLICY = "torch.distributed.fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32)"
SHORT = f"fully_shard(model, mp_policy={POLICY})"
PLAN = [
    (ROOT, "fully_shard(model, reshard_after_forward=False)"),
    (ROOT, "", "4 parameters stay whole on each rank"),
    (LAST, "fully_shard(last)", "all-gathers of a step: 7, expected 6"),
    (LAST, "", "as block 0 begins, whole blocks: 0 and 2, expected 0"),
    (ROOT, AGAIN, "all-gathers of a step: 7, expected 6"),
    (ROOT, SHORT, "away from that of one process"),
    (BLOCKS, "", LAST, "", "whole blocks: 0 and 1 and 2, expected 0"),
    (BLOCKS, KEPT, "as block 1 begins, whole blocks: 0 and 1, expected 1"),
    (ROOT, "", "*others", f"{ROOT}\n    *others", "the root comes after its blocks"),
]
test_right, test_wrong = edited(build, {"shard_blocks": PLAN})
