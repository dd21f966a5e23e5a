"""The builds take right answers in any dress, and no wrong one."""

from mgpu_tutorial.fully_shard.builds import build
from tests.builds import Right, Wrong, edited

BLOCKS = "for block in others:\n        fully_shard(block, **settings)"
LAST = "fully_shard(last, reshard_after_forward=False, **settings)"
ROOT = "fully_shard(model, **settings)"
KEPT = BLOCKS.replace("**settings", "reshard_after_forward=False")
AGAIN = "fully_shard(model, reshard_after_forward=True)"
POLICY = "torch.distributed.fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32)"
SHORT = f"fully_shard(model, mp_policy={POLICY})"
PLAN = [
    Right("shard_blocks", replace={ROOT: "fully_shard(model, reshard_after_forward=False)"}),
    Wrong("shard_blocks", replace={ROOT: ""}, says="4 parameters stay whole on each rank"),
    Wrong(
        "shard_blocks",
        replace={LAST: "fully_shard(last)"},
        says="all-gathers of a step: 7, expected 6",
    ),
    Wrong(
        "shard_blocks",
        replace={LAST: ""},
        says="as block 0 begins, whole blocks: 0 and 2, expected 0",
    ),
    Wrong("shard_blocks", replace={ROOT: AGAIN}, says="all-gathers of a step: 7, expected 6"),
    Wrong("shard_blocks", replace={ROOT: SHORT}, says="away from that of one process"),
    Wrong(
        "shard_blocks",
        replace={BLOCKS: "", LAST: ""},
        says="whole blocks: 0 and 1 and 2, expected 0",
    ),
    Wrong(
        "shard_blocks",
        replace={BLOCKS: KEPT},
        says="as block 1 begins, whole blocks: 0 and 1, expected 1",
    ),
    Wrong(
        "shard_blocks",
        replace={ROOT: "", "*others": f"{ROOT}\n    *others"},
        says="the root comes after its blocks",
    ),
]
test_right, test_wrong = edited(build, PLAN)
