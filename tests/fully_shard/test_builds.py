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
AHEAD = "for block in (self, *self.after):"
BEFORE = "for block in (self, *self.before):"
UNLESS = "if self.whole is None and self.work is None:"
CLEAR = "whole, self.coming, self.work = self.coming, None, None"
SEND = "group=self.group, async_op=True\n            )"
STALE = "if self.work and self.coming_version != self.shard._version:"
BLOCK = [
    Right(
        "PrefetchingBlock",
        replace={
            AHEAD: "self.begin()\n        for block in self.after:",
            UNLESS: "if not (self.work or isinstance(self.whole, torch.Tensor)):",
        },
    ),
    Right("PrefetchingBlock", replace={BEFORE: "for block in [self] + [*self.before]:"}),
]
WRONG = {  # what is written instead, and what the row says
    "of blocks 0, and not of 0, 1": {AHEAD: "for block in (self,):"},
    "of blocks 1, 0, and not of 0, 1": {AHEAD: "for block in (*self.after, self):"},
    "of blocks 3, and not of 3, 2": {BEFORE: "for block in (self,):"},
    "of blocks 2, 3, and not of 3, 2": {BEFORE: "for block in (*self.before, self):"},
    "nobody waits for block 0's gather": {"self.work.wait()\n        whole,": "whole,"},
    "it has waited for block 1": {SEND: f"{SEND}\n            self.work.wait()"},
    "'NoneType' object has no attribute 'wait'": {"async_op=True": "async_op=False"},
    "of blocks 0, 1, 0": {UNLESS: "if True:"},
    "the output": {STALE: "if False:"},
    "gathered tensors are still there": {CLEAR: f"{CLEAR}\n        self.kept = whole"},
}
BLOCK += [Wrong("PrefetchingBlock", edit, says) for says, edit in WRONG.items()]
BLOCK.append(
    Wrong(
        "PrefetchingBlock",
        replace={"dist.get_world_size(self.group)": "dist.get_world_size()"},
        says="invalid tensor size",
    )
)
test_right, test_wrong = edited(build, PLAN + BLOCK)
