"""The builds take right answers in other words, and say what is wrong with the others."""

from mgpu_tutorial.step_time.builds import build
from tests.builds import edited

BY_BUBBLE = """slot = operations / rate + messages
    all = micro_batches * slot * (1 + (stages - 1) / micro_batches)
    least = all - 2 / 3 * slot + max(gradients / link, 2 / 3 * slot)
    return [least, all + gradients / link]"""
HIDDEN, MOST = "most - min(sending, backward), most", "working + waiting + sending"
STEP = [
    (HIDDEN, "working + waiting + max(0, sending - backward), most"),
    ("slot =…", BY_BUBBLE),
    (MOST, "working", HIDDEN, "most, most", "three stages"),
    ("(stages - 1) * slot", "(stages - 1) * operations / rate", "three stages"),
    ("stages - 1", "stages", HIDDEN, "most, most", "one micro-batch of 3 s"),
    (HIDDEN, "most - sending, most", "5 s of sending, entry 0"),
    ("2 / 3 * slot", "2 / 3 * operations / rate", "5 s of sending, entry 0"),
    (HIDDEN, "most, most", "1 s of sending"),
    ("operations / rate + messages", "operations / rate")
    + (HIDDEN, "most + messages, most + messages", "0.5 s of messages"),
]
test_right, test_wrong = edited(build, {"step_seconds": STEP})
