"""The build of the chapter takes right answers in other words, and says what is wrong."""

from mgpu_tutorial.ddp_reducer.builds import build
from tests.builds import right_and_wrong

HEAD = """\
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

def signs_with_feedback(rest, bucket):
"""


def hook(*lines, last="return allreduce_hook(None, bucket)"):
    first = "for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):"
    body = [first, *(f"    {line}" for line in lines), last]
    return HEAD + "".join(f"    {line}\n" for line in body)


WANTED = "wanted = gradient + rest.get(parameter, 0)"
SENT = "sent = wanted.sign() * wanted.abs().mean()"
KEEP, PUT = "rest[parameter] = wanted - sent", "gradient.copy_(sent)"
MEAN = """\
flat = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(flat, async_op=True)
    return work.get_future().then(lambda done: flat)"""
RIGHT = [
    hook(WANTED, SENT, KEEP, PUT),
    hook(WANTED, SENT, KEEP, "gradient[:] = sent", last=MEAN),
    hook(
        "gradient += rest.get(parameter, torch.zeros_like(gradient))",
        "sent = gradient.sign() * gradient.abs().sum() / gradient.numel()",
        "rest[parameter] = gradient - sent",
        PUT,
    ),
]
WRONG = {
    hook(
        "wanted = ...", SENT, "...", last="return allreduce_hook(None, bucket)"
    ): "a `...` is left to fill in",
    hook("wanted = gradient", SENT, KEEP, PUT): "is missing or too much",
    hook(WANTED, SENT, PUT, KEEP.replace("wanted", "gradient")): "the rest of gradient 0: [0",
    hook(WANTED, SENT, KEEP, "gradient = sent"): "alone, gradient 0",
    hook(WANTED, SENT, PUT): "after one step `rest` has 0 of the 8 parameters as its keys",
    hook(WANTED, SENT, KEEP.replace("parameter", "bucket.index()"), PUT): "has 0 of the 8",
    hook(WANTED, "sent = wanted.sign()", KEEP, PUT): "alone, gradient 0",
    hook(WANTED, SENT, KEEP, PUT, last="return bucket.buffer()"): "rank 0 raised",
    hook(
        WANTED,
        SENT,
        KEEP,
        PUT,
        last="done = torch.futures.Future(); done.set_result(bucket.buffer()); return done",
    ): "with world_size 2",
}


test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG.items())
