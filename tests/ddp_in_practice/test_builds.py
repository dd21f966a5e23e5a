"""The builds of the chapter take right answers in other words, and say what is wrong."""

from mgpu_tutorial.ddp_in_practice.builds import build
from tests.builds import Right, Wrong, edited

FIRST = "from contextlib import nullcontext\n    "
NUMBERED = f"""{FIRST}for i, part in enumerate(parts):
        with nullcontext() if part is parts[-1] else model.no_sync():
            loss = loss_of(model, part) * len(part) / sum(map(len, parts))
        loss.backward()"""
SHARED, LAST = " * share).backward()", "\n    (loss_of(model, part) * share)"
OUTSIDE = f"""{FIRST}for part, share in zip(parts, shares):
        loss = loss_of(model, part) * share
        with nullcontext() if part is parts[-1] else model.no_sync():
            loss.backward()"""
AT_ONCE = """losses = [loss_of(model, part) for part in parts]
    (sum(losses) / len(parts)).backward()"""
NEEDLESS = f"""{LAST}.backward()
    if dist.get_rank() > 0:  # rank 0 alone takes the step
        model.zero_grad(set_to_none=False)"""
EVERY_TIME = """for part, share in zip(parts, shares):
        (loss_of(model, part) * share).backward()"""
CHECKED = """assert len({len(part) for part in parts}) == 1, "unequal"
    shares = [1 / len(parts)] * len(parts)"""
REFUSES = CHECKED.replace("assert", "if").replace(
    ' == 1, "unequal"', " != 1:\n        raise ValueError('unequal parts')"
)
SHARES = "shares = [weight / sum(weights) for weight in weights]"
ACCUMULATE = [
    Right("accumulate", replace={"*first…": NUMBERED}),
    Right("accumulate", replace={"if weights is None:\n        weights": "weights"}),
    Wrong(
        "accumulate",
        replace={SHARES: "shares = [1 / len(parts)] * len(parts)"},
        says="2 ranks, unequal parts, rank 0: in its gradient sample 0 counts",
    ),
    Wrong("accumulate", replace={SHARES: REFUSES}, says="unequal parts"),
    Wrong(
        "accumulate",
        replace={"*first, last =": "first =", f"part, share = last{LAST}.backward()": ""},
        says="with one part, the b",
    ),
    Wrong(
        "accumulate",
        replace={"*first…": OUTSIDE},
        says="with three parts, the buckets that DDP sends: 18",
    ),
    Wrong(
        "accumulate",
        replace={"*first…": EVERY_TIME},
        says="with three parts, the buckets that DDP sends: 18, expected 6",
    ),
    Wrong(
        "accumulate",
        replace={
            "part, share = last": "with model.no_sync():",
            LAST: LAST.replace("    (", "        part, share = last\n        ("),
        },
        says="with one part, the buckets that DDP sends: 0, expected 6",
    ),
    Wrong(
        "accumulate",
        replace={"in first:": "in first[:1]:"},
        says="3 ranks, parts: 4, rank 0: in its gradient sample 2 counts 0",
    ),
    Wrong(
        "accumulate",
        replace={SHARED: ").backward()"},
        says="1 ranks, parts: 2, rank 0: in its gradient every sample counts 2",
    ),
    Wrong(
        "accumulate",
        replace={SHARED: " * share / dist.get_world_size()).backward()"},
        says="2 ranks, parts: 1, rank 0: in its gradient every sample counts 0.5 times",
    ),
    Wrong(
        "accumulate",
        replace={f"{LAST}.backward()": NEEDLESS},
        says="2 ranks, parts: 1, rank 1: in its gradient every",
    ),
    Wrong(
        "accumulate",
        replace={"*first…": AT_ONCE},
        says="the bytes kept for backward in 3 parts: 147936, expected 49312",
    ),
]
WAITS = "if is_sent:"
FLAG = "self.is_syncing = False"
AFTER = "self.is_syncing = True\n\n    def"
TRY = "finally:\n            "
ACCUMULATING = [
    Right(
        "AccumulatingDDP",
        replace={
            FLAG: "before, self.is_syncing = self.is_syncing, False",
            f"    {AFTER}": "    self.is_syncing = before\n\n    def",
        },
    ),
    Right(
        "AccumulatingDDP",
        replace={
            WAITS: "if not self.is_syncing and parameter not in self.ready:\n"
            "            return\n"
            "        if True:"
        },
    ),
    Wrong(
        "AccumulatingDDP",
        replace={WAITS: "if True:"},
        says="RuntimeError: a second backward before finish",
    ),
    Wrong(
        "AccumulatingDDP",
        replace={WAITS: "if self.is_syncing:"},
        says="a second backward began inside no_sync, and rank 0 said",
    ),
    Wrong(
        "AccumulatingDDP",
        replace={FLAG: "pass"},
        says="RuntimeError: a second backward before finish",
    ),
    Wrong(
        "AccumulatingDDP",
        replace={f"    {AFTER}": "    pass\n\n    def"},
        says="`head.weight` sent no gradient",
    ),
    Wrong(
        "AccumulatingDDP",
        replace={
            TRY: "except ZeroDivisionError:\n            pass\n        if True:\n            "
        },
        says="after an error in no_sync, the means of 2 and 4, entry 0 of 2: 2, expected 3",
    ),
    Wrong(
        "AccumulatingDDP",
        replace={"super().gradient_ready(parameter)": "pass"},
        says="sent no gradient",
    ),
    Wrong(
        "AccumulatingDDP",
        replace={"is_sent = ": "parameter.grad *= 1 + self.is_syncing\n        is_sent = "},
        says="1 ranks, parts: 2, rank 0: in its gradient every sample counts 2 times",
    ),
]
test_right, test_wrong = edited(build, [*ACCUMULATE, *ACCUMULATING])
