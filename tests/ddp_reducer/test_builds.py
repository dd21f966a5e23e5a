"""The build of the chapter takes right answers in other words, and says what is wrong."""

from mgpu_tutorial.ddp_reducer.builds import build
from tests.builds import edited

MEAN = """flat = bucket.buffer().div_(torch.distributed.get_world_size(group))
    work = torch.distributed.all_reduce(flat, group=group, async_op=True)
    return work.get_future().then(lambda done: flat)"""
ADDED = """gradient += rest.get(parameter, torch.zeros_like(gradient))
        sent = gradient.sign() * gradient.abs().sum() / gradient.numel()
        rest[parameter] = gradient - sent"""
PUT, KEEP = "gradient.copy_(sent)", "rest[parameter] = wanted - sent"
UNEQUAL = "lambda mean: mean.value() * (1 + 1e-6 * dist.get_rank())"
GROUP = "    group: dist.ProcessGroup | None = None,\n"
SEND = "return allreduce_hook(group, bucket)"
EDITS = [
    (PUT, "gradient[:] = sent", SEND, MEAN),
    ("wanted =…", f"{ADDED}\n        {PUT}\n    {SEND}"),
    ("gradient + rest.get(parameter, 0)", "gradient", "away from the sum of all gradients"),
    (KEEP, f"{PUT}\n        rest[parameter] = gradient - sent", "the rest of gradient 0: [0"),
    (PUT, "gradient = sent", "still holds the gradients themselves"),
    (KEEP, "rest[bucket.index()] = wanted - sent", "`rest` has 0 of the 8 parameters"),
    (" * wanted.abs().mean()", "", "alone, gradient 0"),
    (SEND, "return bucket.buffer()", "rank 0 raised"),
    (SEND, "return allreduce_hook(None, bucket)", "groups {0, 2} and {1, 3}, rank 0"),
    (GROUP, "", SEND, "return allreduce_hook(None, bucket)", "no argument `group`"),
    (SEND, f"{SEND}.then({UNEQUAL})", "the gradients of 2 ranks differ by"),
]
test_right, test_wrong = edited(build, {"signs_with_feedback": EDITS})
