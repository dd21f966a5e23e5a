"""The builds of the chapter take right answers in other words, and say what is wrong."""

from mgpu_tutorial.ddp_in_practice.builds import build
from tests.builds import edited

FIRST = "from contextlib import nullcontext\n    "
NUMBERED = f"""{FIRST}for i, part in enumerate(parts):
        with nullcontext() if part is parts[-1] else model.no_sync():
            loss = loss_of(model, part) * len(part) / sum(map(len, parts))
        loss.backward()"""
DIVIDED, LAST = " / len(parts)).backward()", "(loss_of(model, last) / len(parts))"
OUTSIDE = f"""{FIRST}for i, part in enumerate(parts):
        loss = loss_of(model, part) / len(parts)
        with nullcontext() if part is parts[-1] else model.no_sync():
            loss.backward()"""
AT_ONCE = """losses = [loss_of(model, part) for part in parts]
    (sum(losses) / len(parts)).backward()"""
NEEDLESS = f"""{LAST}.backward()
    if dist.get_rank() > 0:  # rank 0 alone takes the step
        model.zero_grad(set_to_none=False)"""
EVERY_TIME = """for part in parts:
        (loss_of(model, part) / len(parts)).backward()"""
CHECK = "if not sizes or len(set(sizes)) > 1 or 0 in sizes:"
FORGOTTEN = f"        {LAST}.backward()"
HAS = 'if not hasattr(model, "no_sync"):'
ACCUMULATE = [
    (CHECK, "if False:", "*first…", NUMBERED),
    (CHECK, "if len({len(part) for part in parts}) != 1:"),
    (HAS, "if False:"),
    (CHECK, "if False:", "2 ranks, unequal parts, rank 0: in its gradient sample 0 counts"),
    (
        "*first, last = parts",
        "first = parts",
        f"{LAST}.backward()",
        "",
        "with one part, the b",
    ),
    ("*first…", OUTSIDE, "with three parts, the buckets that DDP sends: 18"),
    ("*first…", EVERY_TIME, "with three parts, the buckets that DDP sends: 18, expected 6"),
    (
        f"    {LAST}.backward()",
        FORGOTTEN,
        "with one part, the buckets that DDP sends: 0, expected 6",
    ),
    (
        "in first",
        "in first[:1]",
        "3 ranks, parts: 4, rank 0: in its gradient sample 2 counts 0",
    ),
    (
        DIVIDED,
        ").backward()",
        "1 ranks, parts: 2, rank 0: in its gradient every sample counts 2",
    ),
    (
        DIVIDED,
        " / len(parts) / dist.get_world_size()).backward()",
        "2 ranks, parts: 1, rank 0: in its gradient every sample counts 0.5 times",
    ),
    (f"{LAST}.backward()", NEEDLESS, "2 ranks, parts: 1, rank 1: in its gradient every"),
    ("*first…", AT_ONCE, "the bytes kept for backward in 3 parts: 147936, expected 49312"),
]
WAITS = "if self.is_syncing or parameter in self.ready:"
FLAG = "before, self.is_syncing = self.is_syncing, False"
TRY = "finally:  # after an error too\n            "
ACCUMULATING = [
    (FLAG, "self.is_syncing = False", "self.is_syncing = before", "self.is_syncing = True"),
    (
        WAITS,
        "if not self.is_syncing and parameter not in self.ready:\n            return\n"
        "        if True:",
    ),
    (WAITS, "if True:", "RuntimeError: a second backward before finish"),
    (WAITS, "if self.is_syncing:", "a second backward began inside no_sync, and rank 0 said"),
    (FLAG, "before = True", "RuntimeError: a second backward before finish"),
    ("self.is_syncing = before", "pass", "`head.weight` got no gradient"),
    (
        TRY,
        "except ZeroDivisionError:\n            pass\n        if True:\n            ",
        "after an error in no_sync, the means of 2 and 4, entry 0 of 2: 2, expected 3",
    ),
    ("super().gradient_ready(parameter)", "pass", "got no gradient"),
    (
        "if self.is_syncing or",
        "parameter.grad *= 1 + self.is_syncing\n        if self.is_syncing or",
        "1 ranks, parts: 2, rank 0: in its gradient every sample counts 2 times",
    ),
]
test_right, test_wrong = edited(
    build, {"accumulate": ACCUMULATE, "AccumulatingDDP": ACCUMULATING}
)
