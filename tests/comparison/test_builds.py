"""The build takes right answers in any dress, and no wrong one."""

from mgpu_tutorial.comparison.builds import build
from tests.builds import right_and_wrong


def at_least(*lines):
    body = "\n    ".join(lines)
    head = "def seconds_at_least(step, gpus, rate, memory, bandwidth):"
    return f"{head}\n    {body}\n"


COMPUTING = "step.operations / gpus / rate"
KEEPING = "2 * step.saved / gpus / memory"
SENDING = "8 * step.parameters * (gpus - 1) / gpus / bandwidth"
RIGHT = [
    at_least(f"return max({COMPUTING}, {KEEPING}, {SENDING})"),
    at_least(
        "sent = 4 * step.parameters / gpus * 2 * (gpus - 1)",
        "work = step.operations / rate, (step.saved + step.saved) / memory",
        "return max(max(work) / gpus, sent / bandwidth)",
    ),
    at_least(f"parts = [{SENDING}, {KEEPING}, {COMPUTING}]", "return sorted(parts)[-1]"),
]
WRONG = [
    (at_least(f"return {COMPUTING} + {KEEPING} + {SENDING}"), "30 s, 60 s and 40 s"),
    (at_least(f"return max(step.operations / rate, {KEEPING}, {SENDING})"), "on 4 GPUs"),
    (
        at_least(f"return max({COMPUTING}, step.saved / gpus / memory, {SENDING})"),
        "60, expected",
    ),
    (
        at_least(f"return max({COMPUTING}, {KEEPING}, 4 * step.parameters / bandwidth)"),
        "4 GPUs: 40, expected 60",
    ),
    (
        at_least(f"return max({COMPUTING}, {KEEPING}, {SENDING} / 4)"),
        "2 GPUs: 10, expected 40",
    ),
    (at_least(f"max({COMPUTING}, {KEEPING}, {SENDING})"), "nothing was returned"),
    (at_least("..."), "a `...` is left to fill in"),
]


test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG)
