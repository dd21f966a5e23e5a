"""The build of the chapter takes right answers in other words, and says what is wrong."""

from mgpu_tutorial.ddp_in_practice.builds import build
from tests.builds import edited

FIRST = "from contextlib import nullcontext\n    "
NUMBERED = f"""{FIRST}for i, part in enumerate(parts):
        with nullcontext() if part is parts[-1] else model.no_sync():
            loss = model(part).square().sum() / sum(map(len, parts)) / 10
        loss.backward()"""
DIVIDED, LAST = " / len(parts)).backward()", "(model(last).square().mean() / len(parts))"
OUTSIDE = f"""{FIRST}for i, part in enumerate(parts):
        loss = model(part).square().mean() / len(parts)
        with nullcontext() if part is parts[-1] else model.no_sync():
            loss.backward()"""
AT_ONCE = """losses = [model(part).square().mean() for part in parts]
    (sum(losses) / len(parts)).backward()"""
NEEDLESS = f"""{LAST}.backward()
    if dist.get_rank() > 0:  # rank 0 alone takes the step
        model.zero_grad()"""
CHECK = "if not sizes or len(set(sizes)) > 1 or 0 in sizes:"
ACCUMULATE = [
    (CHECK, "if False:", "*first…", NUMBERED),
    (CHECK, "if len({len(part) for part in parts}) != 1:"),
    (CHECK, "if False:", "with unequal parts the gradients, entry 0"),
    (
        "*first, last = parts",
        "first = parts",
        f"{LAST}.backward()",
        "",
        "with one part, the b",
    ),
    ("*first…", OUTSIDE, "with three parts, the buckets that DDP sends: 18"),
    ("in first", "in first[:1]", "rank 0 of 3, batch.tensor_split(4): the gradients"),
    (DIVIDED, " / len(parts) / dist.get_world_size()).backward()", "rank 0 of 2, batch"),
    (f"{LAST}.backward()", NEEDLESS, "rank 1 of 2, batch.tensor_split(1): the"),
    ("*first…", AT_ONCE, "the bytes kept for backward in 3 parts: 147936, expected 49312"),
]
test_right, test_wrong = edited(build, {"accumulate": ACCUMULATE})
