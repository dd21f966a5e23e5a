"""The builds take right answers in any dress, and no wrong one."""

from mgpu_tutorial.fully_shard.builds import build
from tests.builds import right_and_wrong

IMPORTS = """\
from torch.distributed.fsdp import fully_shard
from mgpu_tutorial.fully_shard.units import loss_of
"""


def plan(*lines):
    body = "\n    ".join(lines)
    return f"{IMPORTS}\ndef shard_blocks(model):\n    {body}\n"


def parts(*lines):
    head = "def accumulate_gradients(model, micro_batches):\n    count = len(micro_batches)"
    return f"{IMPORTS}\n{head}\n    " + "\n    ".join(lines) + "\n"


LOOP = "for i, tokens in enumerate(micro_batches):"
BACK = "    (loss_of(model, tokens) / count).backward()"
RIGHT = [
    plan(
        "for block in model.blocks:",
        "    fully_shard(block, reshard_after_forward=block is not model.blocks[-1])",
        "fully_shard(model)",
    ),
    plan(
        "fully_shard(model.blocks[-1], reshard_after_forward=False)",
        "for block in reversed(model.blocks[:-1]):",
        "    fully_shard(block)",
        "fully_shard(model, reshard_after_forward=False)",
    ),
    parts(LOOP, "    model.set_requires_gradient_sync(i + 1 == count)", BACK),
    parts(
        "*first, last = micro_batches",
        "model.set_requires_gradient_sync(False)",
        "for tokens in first:",
        BACK,
        "model.set_requires_gradient_sync(True)",
        "(loss_of(model, last) / count).backward()",
    ),
]
EACH = "for block in model.blocks:"
WRONG = [
    (plan("fully_shard(model)"), "as block 0 begins, the blocks that are whole"),
    (plan(EACH, "    fully_shard(block)"), "4 parameters stay whole on each rank"),
    (
        plan(EACH, "    fully_shard(block)", "fully_shard(model)"),
        "all-gathers of a step: 7, expected 6",
    ),
    (
        plan(
            EACH, "    fully_shard(block, reshard_after_forward=False)", "fully_shard(model)"
        ),
        "as block 1 begins, the blocks that are whole",
    ),
    (plan("fully_shard(model)", EACH, "    fully_shard(block)"), "value was None"),
    (plan("..."), "a `...` is left to fill in"),
    (parts(LOOP, BACK), "in 4 parts, the calls of reduce-scatter: 16, expected 4"),
    (
        parts(
            LOOP,
            "    model.set_requires_gradient_sync(i + 1 == count)",
            "    loss_of(model, tokens).backward()",
        ),
        "(2 times as long)",
    ),
    (parts(LOOP, "    model.set_requires_gradient_sync(False)", BACK), "has no gradient of"),
    (parts(LOOP, "    model.set_requires_gradient_sync(i == 0)", BACK), "differs from that"),
    (
        parts("(loss_of(model, micro_batches[-1]) / count).backward()"),
        "differs from that of one process",
    ),
]


test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG)
