"""The build takes right answers in other words, and says what is wrong with the others."""

from mgpu_tutorial.comparison.builds import build
from tests.builds import Right, Wrong, edited

AT_ONCE = """sent = 4 * step.parameters / gpus * 2 * (gpus - 1)
    work = step.operations / rate, (step.saved + step.saved) / memory
    return max(max(work) / gpus, sent / bandwidth)"""
SENDING, MAX = "2 * (gpus - 1) / gpus * 4", "max(computing, keeping, sending)"
AT_LEAST = [
    Right("seconds_at_least", replace={"computing =…": AT_ONCE}),
    Right("seconds_at_least", replace={MAX: "sorted([sending, keeping, computing])[-1]"}),
    Wrong(
        "seconds_at_least",
        replace={MAX: "computing + keeping + sending"},
        says="30 s, 60 s and 40 s",
    ),
    Wrong(
        "seconds_at_least",
        replace={"step.operations / gpus": "step.operations"},
        says="GPUs: 4",
    ),
    Wrong("seconds_at_least", replace={"2 * step.saved": "step.saved"}, says="60, expected"),
    Wrong("seconds_at_least", replace={"step.saved / gpus": "step.saved"}, says="GPUs: 3"),
    Wrong("seconds_at_least", replace={SENDING: "4"}, says="GPUs: 4: 40, expected 60"),
    Wrong(
        "seconds_at_least",
        replace={SENDING: "(gpus - 1) / gpus * 2"},
        says="GPUs: 2: 10, expected 40",
    ),
    Wrong("seconds_at_least", replace={f"return {MAX}": MAX}, says="nothing was returned"),
    Wrong(
        "seconds_at_least",
        replace={f"return {MAX}": f"return complex({MAX}, 5)"},
        says="has an imaginary part",
    ),
    Wrong(
        "seconds_at_least",
        replace={"gpus < 1 or ": ""},
        says="gpus=0, rate=100, memory=100, bandwidth=100: ZeroDivisionError",
    ),
    Wrong(
        "seconds_at_least",
        replace={"min(rate, memory, bandwidth)": "rate"},
        says="memory=0, bandwidth=100: ZeroDivisionError",
    ),
    Wrong(
        "seconds_at_least",
        replace={" <= 0:": " < 0:"},
        says="gpus=1, rate=0, memory=100, bandwidth=100: ZeroDivisionError",
    ),
]
test_right, test_wrong = edited(build, AT_LEAST)
