"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.step_time.builds import build
from tests.builds import Right, Wrong, edited

BY_BUBBLE = """slot = operations / rate + messages
    compute = micro_batches * operations / rate
    all = micro_batches * slot * (1 + (stages - 1) / micro_batches)
    last = max(gradients / link, 2 / 3 * slot) - 2 / 3 * slot
    return [compute, all + last - compute]"""
UNHIDDEN = "max(0, gradients / link - 2 / 3 * slot)"
EXPOSED = "micro_batches * messages + waiting + unhidden"
SENT, THROUGH = "5 s of sending", "5 s of sending, through three stages"
STEP = [
    Right("step_seconds", replace={"compute =…": BY_BUBBLE}),
    Right(
        "step_seconds",
        replace={UNHIDDEN: "gradients / link - min(gradients / link, 2 / 3 * slot)"},
    ),
]

STEP += [
    Wrong("step_seconds", replace={EXPOSED: "micro_batches * messages"}, says="three stages"),
    Wrong(
        "step_seconds",
        replace={"(stages - 1) * slot": "(stages - 1) * compute"},
        says="three stages",
    ),
    Wrong("step_seconds", replace={"stages - 1": "stages"}, says="one micro-batch of 3 s"),
    Wrong("step_seconds", replace={UNHIDDEN: "0"}, says=SENT),
    Wrong("step_seconds", replace={UNHIDDEN: "gradients / link"}, says="1 s of sending"),
    Wrong("step_seconds", replace={"max(0, ": "min(0, "}, says="one micro-batch of 3 s"),
    Wrong("step_seconds", replace={"2 / 3 * slot": "2 / 3 * compute"}, says=SENT),
    Wrong("step_seconds", replace={"2 / 3 * slot": "2 / 3 * slot - waiting"}, says=THROUGH),
    Wrong("step_seconds", replace={"2 / 3 * slot": "2 / 3 * stages * slot"}, says=THROUGH),
    Wrong(
        "step_seconds",
        replace={"gradients / link": "gradients / stages / link"},
        says=THROUGH,
    ),
    Wrong(
        "step_seconds",
        replace={"micro_batches * messages + waiting": "messages + waiting"},
        says="0.5 s of messages",
    ),
    Wrong(
        "step_seconds",
        replace={"return micro_batches * compute,": "return micro_batches * slot,"},
        says="0.5 s of messages",
    ),
]
test_right, test_wrong = edited(build, STEP)
