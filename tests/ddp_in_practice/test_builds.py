"""The build of the chapter takes right answers in other words, and says what is wrong."""

from mgpu_tutorial.ddp_in_practice.builds import build
from tests.builds import right_and_wrong


def accumulate(*lines):
    head = "import contextlib\nimport torch\n\ndef accumulate(model, parts):\n"
    return head + "".join(f"    {line}\n" for line in lines)


MEAN = "(model({}).square().mean() / len(parts)).backward()"
LOOP = ("for i, part in enumerate(parts):", "    last = i == len(parts) - 1")
EITHER = "    with contextlib.nullcontext() if last else model.no_sync():"
RIGHT = [
    accumulate(
        "with model.no_sync():",
        "    for part in parts[:-1]:",
        f"        {MEAN.format('part')}",
        MEAN.format("parts[-1]"),
    ),
    accumulate(*LOOP, EITHER, f"        {MEAN.format('part')}"),
    accumulate(
        *LOOP,
        EITHER,
        "        loss = model(part).square().sum() / sum(map(len, parts)) / 10",
        "    loss.backward()",
    ),
]
WRONG = {
    accumulate("first = ...", "last = ..."): "a `...` is left to fill in",
    accumulate("for part in parts:", f"    {MEAN.format('part')}"): "expected 6",
    accumulate(*LOOP, EITHER, "        model(part).square().mean().backward()"): (
        "rank 0 of 1, with 2 parts: its gradients differ from those of one process "
        "(2 times as long)"
    ),
    accumulate(
        "with model.no_sync():", "    for part in parts:", f"        {MEAN.format('part')}"
    ): "with one part, the buckets that DDP sends: 0, expected 6",
    accumulate(
        *LOOP,
        "    loss = model(part).square().mean() / len(parts)",
        EITHER,
        "        loss.backward()",
    ): "with three parts, the buckets that DDP sends: 18",
    accumulate(MEAN.format("parts[-1]")): "differ from those of one process",
    accumulate(
        "sum(model(part).square().mean() for part in parts).div(len(parts)).backward()"
    ): "the bytes kept for backward in 3 parts: 147936, expected 49312",
    accumulate(MEAN.format("torch.cat(parts)").replace("len(parts)", "1")): (
        "the bytes kept for backward in 3 parts"
    ),
}


test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG.items())
