"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.step_time.builds import build
from tests.builds import Right, Wrong, edited

BY_BUBBLE = """slot = operations / rate + messages
    all = micro_batches * slot * (1 + (stages - 1) / micro_batches)
    least = all - 2 / 3 * slot + max(gradients / link, 2 / 3 * slot)
    return [least, all + gradients / link]"""
HIDDEN, MOST = "most - min(sending, backward), most", "working + waiting + sending"
SENT = "stages, with 5 s of sending"  # a pipeline and gradients together
STEP = [
    Right(
        "step_seconds",
        replace={HIDDEN: "working + waiting + max(0, sending - backward), most"},
    ),
    Right("step_seconds", replace={"slot =…": BY_BUBBLE}),
    Wrong(
        "step_seconds", replace={MOST: "working", HIDDEN: "most, most"}, says="three stages"
    ),
    Wrong(
        "step_seconds",
        replace={"(stages - 1) * slot": "(stages - 1) * operations / rate"},
        says="three stages",
    ),
    Wrong(
        "step_seconds",
        replace={"stages - 1": "stages", HIDDEN: "most, most"},
        says="one micro-batch of 3 s",
    ),
    Wrong(
        "step_seconds",
        replace={HIDDEN: "most - sending, most"},
        says="5 s of sending, entry 0",
    ),
    Wrong(
        "step_seconds",
        replace={"2 / 3 * slot": "2 / 3 * operations / rate"},
        says="5 s of sending, entry 0",
    ),
    Wrong("step_seconds", replace={HIDDEN: "most, most"}, says="1 s of sending"),
    Wrong(
        "step_seconds",
        replace={
            "operations / rate + messages": "operations / rate",
            HIDDEN: "most + messages, most + messages",
        },
        says="0.5 s of messages",
    ),
    Wrong(
        "step_seconds",
        replace={HIDDEN: "most - min(sending, backward + waiting), most"},
        says=SENT,
    ),
    Wrong(
        "step_seconds",
        replace={HIDDEN: "most - min(sending, backward * stages), most"},
        says=SENT,
    ),
    Wrong("step_seconds", replace={"2 / 3 * slot": "2 / 3 * (slot + waiting)"}, says=SENT),
    Wrong(
        "step_seconds", replace={"gradients / link": "gradients * stages / link"}, says=SENT
    ),
    Wrong(
        "step_seconds", replace={"gradients / link": "gradients / stages / link"}, says=SENT
    ),
    Wrong(
        "step_seconds",
        replace={HIDDEN: "most - min(sending, backward) * (stages == 1), most"},
        says=SENT,
    ),
]
test_right, test_wrong = edited(build, STEP)
