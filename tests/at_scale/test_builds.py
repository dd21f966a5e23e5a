"""The build takes right answers in any dress, and no wrong one."""

from mgpu_tutorial.at_scale.builds import build
from tests.builds import Right, Wrong, edited, right_and_wrong


def splits(condition, loops="tp * pp * cp * dp == gpus"):
    return f"""from itertools import product
def splits(gpus, tensor, context, experts):
    found = []
    for tp, pp, cp, dp, ep in product(range(1, gpus + 1), repeat=5):
        if {loops} and {condition}:
            found.append((tp, pp, cp, dp, ep))
    return found
"""


LIMITS = "tp <= tensor and cp <= context"
EXPERTS = "dp % ep == 0 and experts % ep == 0"
YIELDED = """def splits(gpus, tensor, context, experts):
    for tp in range(1, tensor + 1):
        for cp in range(1, context + 1):
            rest, left = divmod(gpus, tp * cp)
            for pp in range(1, rest + 1):
                dp = rest // pp
                if left == 0 and rest % pp == 0:
                    for ep in range(1, dp + 1):
                        if dp % ep == experts % ep == 0:
                            yield tp, pp, cp, dp, ep
"""
RIGHT = [splits(f"{LIMITS} and {EXPERTS}"), YIELDED]
WRONG = [
    (splits(f"cp <= context and {EXPERTS}"), "no plan: TP is 3, and at most 2 is allowed"),
    (
        splits(f"tensor % tp == 0 and cp <= context and {EXPERTS}"),
        "(3, 1, 1, 4, 1) is missing",
    ),
    (splits(f"tp <= tensor and {EXPERTS}"), "no plan: CP is 2, and at most 1 is allowed"),
    (splits(f"{LIMITS} and dp % ep == 0 and ep <= experts"), "(1, 1, 1, 24, 3) is no plan"),
    (splits(f"{LIMITS} and experts % ep == 0"), "must divide DP 4 and the 8 experts"),
    (splits(f"{LIMITS} and ep == 1"), "is missing"),
    (splits(f"{LIMITS} and {EXPERTS}", "tp * pp * cp * dp * ep == gpus"), "DP is 4, not 8"),
    (RIGHT[0].replace("append((tp, pp", "append((pp, tp"), "order is TP, PP, CP, DP, EP"),
    (RIGHT[0].replace("dp, ep))", "dp))"), "no plan: the order is TP, PP, CP, DP, EP"),
    (splits(f"{LIMITS} and {EXPERTS}", "gpus // tp // pp // cp == dp"), "is no plan"),
    (RIGHT[0].replace("return found", "return 2 * found"), "each once: 2, expected 1"),
]
test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG)

EQUAL, TP = "math.sqrt(gather / summing)", "max(1, min(hides, equal))"
MIXES = [
    Right("best_mix", replace={EQUAL: "(gather / summing) ** 0.5"}),
    Right("best_mix", replace={TP: "1 if gather < compute else min(hides, equal)"}),
    Wrong("best_mix", replace={TP: "min(hides, equal)"}, says="3 s to gather"),
    Wrong("best_mix", replace={TP: "max(1, equal)"}, says="3 s to gather"),
    Wrong("best_mix", replace={TP: "max(1, hides)"}, says="16 s to gather"),
    Wrong("best_mix", replace={TP: "max(1, hides, equal)"}, says="3 s to gather"),
    Wrong("best_mix", replace={EQUAL: "gather / summing"}, says="16 s to gather"),
    Wrong("best_mix", replace={"gpus / tp, tp": "tp, gpus / tp"}, says="TP for 3 s"),
    Wrong("best_mix", replace={"gpus / tp, tp": "gpus, tp"}, says="FSDP on 512 GPUs"),
]
test_a_mix_that_is_right, test_a_mix_that_is_wrong = edited(build, MIXES)
