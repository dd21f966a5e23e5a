"""The build takes right answers in other words, and says what is wrong with the others."""

from mgpu_tutorial.comparison.builds import build
from tests.builds import edited

AT_ONCE = """sent = 4 * step.parameters / gpus * 2 * (gpus - 1)
    work = step.operations / rate, (step.saved + step.saved) / memory
    return max(max(work) / gpus, sent / bandwidth)"""
SENDING, MAX = "2 * (gpus - 1) / gpus * 4", "max(computing, keeping, sending)"
AT_LEAST = [
    ("computing =…", AT_ONCE),
    (MAX, "sorted([sending, keeping, computing])[-1]"),
    (MAX, "computing + keeping + sending", "30 s, 60 s and 40 s"),
    ("step.operations / gpus", "step.operations", "GPUs: 4"),
    ("2 * step.saved", "step.saved", "60, expected"),
    ("step.saved / gpus", "step.saved", "GPUs: 3"),
    (SENDING, "4", "GPUs: 4: 40, expected 60"),
    (SENDING, "(gpus - 1) / gpus * 2", "GPUs: 2: 10, expected 40"),
    (f"return {MAX}", MAX, "nothing was returned"),
    (f"return {MAX}", f"return complex({MAX}, 5)", "has an imaginary part"),
    ("gpus < 1 or ", "", "gpus=0, rate=100, memory=100, bandwidth=100: ZeroDivisionError"),
    ("min(rate, memory, bandwidth)", "rate", "memory=0, bandwidth=100: ZeroDivisionError"),
    (" > 0:", " >= 0:", "gpus=1, rate=0, memory=100, bandwidth=100: ZeroDivisionError"),
]
test_right, test_wrong = edited(build, {"seconds_at_least": AT_LEAST})
