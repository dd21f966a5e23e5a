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
    ("stages - 1", "stages", HIDDEN, "most, most", "one micro-batch of 3 s"),
    (HIDDEN, "most - sending, most", "5 s of sending, entry 0"),
    ("2 / 3 * slot", "2 / 3 * operations / rate", "5 s of sending, entry 0"),
    (HIDDEN, "most, most", "1 s of sending"),
    ("operations / rate + messages", "operations / rate")
    + (HIDDEN, "most + messages, most + messages", "0.5 s of messages"),
]
BY_TIME = """share = 2 * (ranks - 1) / ranks
    (n, b), (N, B) = small, large
    t, T = share * n / b, share * N / B
    beta = share * (N - n) / (T - t)
    return T - share * N / beta, beta"""
FIT = [
    ("sent =…", BY_TIME),
    ("sent =…", "return small[0] / small[1], large[1]", "2 ranks: µs of latency and GB/s"),
    ("2 * (ranks - 1) / ranks * nbytes", "nbytes", "8 ranks: µs of latency and GB/s"),
]
test_right, test_wrong = edited(build, {"step_seconds": STEP, "alpha_beta": FIT})
