"""The builds take right answers in any dress, and no wrong one."""

from mgpu_tutorial.step_time.builds import build
from tests.builds import right_and_wrong

NAMES = "operations, rate, messages, stages, micro_batches, gradients, link"


def seconds(*lines):
    return f"def step_seconds({NAMES}):\n    " + "\n    ".join(lines) + "\n"


def fit(*lines):
    return "def alpha_beta(small, large, ranks):\n    " + "\n    ".join(lines) + "\n"


SLOT = "slot = operations / rate + messages"
ALL = "all = (micro_batches + stages - 1) * slot"
SENT = "sent = gradients / link"
BY_TIME = (
    "share = 2 * (ranks - 1) / ranks",
    "(n, b), (N, B) = small, large",
    "t, T = share * n / b, share * N / B",
)
RIGHT = [
    seconds(SLOT, ALL, SENT, "return all + max(0, sent - slot * 2 / 3), all + sent"),
    seconds(
        SLOT,
        "bubble = 1 + (stages - 1) / micro_batches",
        ALL.replace("(micro_batches + stages - 1)", "micro_batches * bubble"),
        "least = all - 2 / 3 * slot + max(gradients / link, 2 / 3 * slot)",
        "return [least, all + gradients / link]",
    ),
    fit(*BY_TIME, "beta = share * (N - n) / (T - t)", "return T - share * N / beta, beta"),
]
WRONG = [
    (seconds(SLOT, "return micro_batches * slot, micro_batches * slot"), "three stages"),
    (
        seconds(SLOT, ALL.replace(" - 1", ""), SENT, "return all + sent, all + sent"),
        "one micro-batch of 3 s",
    ),
    (seconds(SLOT, ALL, SENT, "return all, all + sent"), "5 s of sending: the least"),
    (
        seconds(
            SLOT,
            ALL,
            SENT,
            "hidden = min(sent, 2 / 3 * operations / rate)",
            "return all + sent - hidden, all + sent",
        ),
        "5 s of sending: the least seconds",
    ),
    (seconds(SLOT, ALL, SENT, "return all + sent, all + sent"), "1 s of sending"),
    (
        seconds("slot = operations / rate", ALL, "return all + messages, all + messages"),
        "0.5 s of messages",
    ),
    (fit("return small[0] / small[1], large[1]"), "2 ranks: the bandwidth"),
    (
        fit(
            "(n, b), (N, B) = small, large",
            "beta = (N - n) / (N / B - n / b)",
            "return n / b - n / beta, beta",
        ),
        "8 ranks: the latency in µs: 11.4",
    ),
]
test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG)
