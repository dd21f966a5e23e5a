"""The build of the chapter takes right answers in other words, and says what is wrong."""

from mgpu_tutorial.ddp_reducer.builds import build
from tests.builds import Right, Wrong, edited

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
    Right("signs_with_feedback", replace={PUT: "gradient[:] = sent", SEND: MEAN}),
    Right(
        "signs_with_feedback", replace={"wanted =…": f"{ADDED}\n        {PUT}\n    {SEND}"}
    ),
    Wrong(
        "signs_with_feedback",
        replace={"gradient + rest.get(parameter, 0)": "gradient"},
        says="away from the sum of all gradients",
    ),
    Wrong(
        "signs_with_feedback",
        replace={KEEP: f"{PUT}\n        rest[parameter] = gradient - sent"},
        says="the rest of gradient 0: [0",
    ),
    Wrong(
        "signs_with_feedback",
        replace={PUT: "gradient = sent"},
        says="still holds the gradients themselves",
    ),
    Wrong(
        "signs_with_feedback",
        replace={KEEP: "rest[bucket.index()] = wanted - sent"},
        says="`rest` has 0 of the 8 parameters",
    ),
    Wrong(
        "signs_with_feedback",
        replace={" * wanted.abs().mean()": ""},
        says="alone, gradient 0",
    ),
    Wrong(
        "signs_with_feedback", replace={SEND: "return bucket.buffer()"}, says="rank 0 raised"
    ),
    Wrong(
        "signs_with_feedback",
        replace={SEND: "return allreduce_hook(None, bucket)"},
        says="groups {0, 2} and {1, 3}, rank 0",
    ),
    Wrong(
        "signs_with_feedback",
        replace={GROUP: "", SEND: "return allreduce_hook(None, bucket)"},
        says="no argument `group`",
    ),
    Wrong(
        "signs_with_feedback",
        replace={SEND: f"{SEND}.then({UNEQUAL})"},
        says="the gradients of 2 ranks differ by",
    ),
]
test_right, test_wrong = edited(build, EDITS)
