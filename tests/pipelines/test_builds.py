"""The builds take right answers in any dress, and no wrong one."""

from mgpu_tutorial.pipelines.builds import build
from tests.builds import right_and_wrong

IMPORTS = """\
import torch
import torch.distributed as dist
from mgpu_tutorial.pipelines.stages import (
    Stage, backward_step, forward_step, recv_backward, recv_forward, send_backward,
    send_forward
)
"""


def gpipe(*lines):
    body = "\n    ".join(lines)
    return f"""{IMPORTS}
def run_gpipe(rank, world_size, work, micro):
    stage = Stage(work, micro)
    {body}
    return stage.losses, stage.gradients()
"""


def order(*lines):
    body = "\n    ".join(lines)
    return f"def order_of_1f1b(rank, ranks, micro):\n    {body}\n"


FORWARD = (
    "for i in range(micro):",
    "    output = forward_step(stage, i, recv_forward(stage))",
    "    send_forward(stage, output)",
)
BACKWARD = (
    "for i in range(micro):",
    "    gradient = backward_step(stage, i, recv_backward(stage))",
    "    send_backward(stage, gradient)",
)
PHASES = (
    "ahead = min(micro, ranks - 1 - rank)",
    "order = [f'F{i}' for i in range(ahead)]",
    "for i in range(ahead, micro):",
    "    order += [f'F{i}', f'B{i - ahead}']",
    "return order + [f'B{i}' for i in range(micro - ahead, micro)]",
)
COUNTED = (
    "order, f, b = [], 0, 0",
    "while b < micro:",
    "    if f < micro and f - b < ranks - rank:",
    "        order, f = [*order, f'F{f}'], f + 1",
    "    else:",
    "        order, b = [*order, f'B{b}'], b + 1",
    "return order",
)
RIGHT = [
    gpipe(*FORWARD, *BACKWARD),
    gpipe(
        "for i in range(micro):",
        "    x = recv_forward(stage) if rank else None",
        "    y = forward_step(stage, i, x)",
        "    if rank < world_size - 1:",
        "        dist.send(y, rank + 1)",
        *BACKWARD,
    ),
    gpipe(
        *FORWARD,
        "for i in list(stage.waiting):",
        "    send_backward(stage, backward_step(stage, i, recv_backward(stage)))",
    ),
    order(*PHASES),
    order(*COUNTED),
    order(
        "first = min(micro, ranks - rank)",
        "order = [f'F{i}' for i in range(first)]",
        "for i in range(micro):",
        "    order.append(f'B{i}')",
        "    if first + i < micro:",
        "        order.append(f'F{first + i}')",
        "return order",
    ),
]
WRONG = [
    (gpipe("..."), "a `...` is left to fill in"),
    (gpipe(*FORWARD), "AttributeError"),
    (gpipe(*FORWARD, *BACKWARD[:-1]), "rank 1 returned while"),
    (gpipe(*FORWARD[:-1], *BACKWARD), "had not returned"),
    (
        gpipe(*FORWARD, *BACKWARD).replace("return stage.losses, stage.gradients()", ""),
        "nothing was returned",
    ),
    (
        gpipe(*FORWARD, "stage.module.zero_grad()", *BACKWARD, "stage.losses.clear()"),
        "the losses, number 2: 0, expected 5",
    ),
    (
        gpipe(
            FORWARD[0],
            "    stage.module.zero_grad()",
            *FORWARD[1:],
            BACKWARD[0],
            "    stage.module.zero_grad()",
            *BACKWARD[1:],
        ),
        "a gradient",
    ),
    (order("..."), "a `...` is left to fill in"),
    (order("return [f'{kind}{i}' for kind in 'FB' for i in range(micro)]"), "F0 B0 F1 B1"),
    (order(*PHASES).replace("ranks - 1 - rank", "2 * (ranks - 1 - rank)"), "held at most"),
    (order("return [f'{kind}{i}' for i in range(micro) for kind in 'FB']"), "the slots"),
    (order(*PHASES[:-1], "return order"), "every B"),
    (order(*PHASES).replace("min(micro, ranks - 1 - rank)", "ranks - 1 - rank"), "every F"),
    (order("print(rank)"), "None is no list"),
]

test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG)
