"""The builds take right answers in any dress, and no wrong one."""

from mgpu_tutorial.mixed_precision.builds import build
from tests.builds import right_and_wrong

IMPORTS = """\
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_
from mgpu_tutorial.distributed_sgd.sgd import average_gradients
"""
AVERAGE, UNSCALE = "average_gradients(model)", "scaler.unscale_(optimizer)"
CLIP = "clip_grad_norm_(model.parameters(), 1.0)"


def finish(*lines):
    body = "\n    ".join([*lines, "scaler.step(optimizer)", "scaler.update()"])
    return f"{IMPORTS}\ndef finish_step(model, optimizer, scaler):\n    {body}\n"


def ask(*lines):
    body = "\n    ".join(lines)
    return f"{IMPORTS}\ndef is_finite_everywhere(gradients):\n    {body}\n"


BY_HAND = (
    "for parameter in model.parameters():",
    "    dist.all_reduce(parameter.grad)",
    "    parameter.grad /= dist.get_world_size()",
)
NORM = (
    "norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()",
    "for parameter in model.parameters():",
    "    parameter.grad /= max(norm, 1.0)",
)
ALL = "all(gradient.isfinite().all() for gradient in gradients)"
RIGHT = [
    finish(*BY_HAND, UNSCALE, CLIP),
    finish(AVERAGE, UNSCALE, *NORM),
    finish(AVERAGE, UNSCALE, "if True:", f"    {CLIP}"),
    ask(
        f"good = torch.tensor(int({ALL}))",
        "dist.all_reduce(good, dist.ReduceOp.MIN)",
        "return bool(good)",
    ),
    ask(
        "bad = torch.zeros(1)",
        "for gradient in gradients:",
        "    bad += (~gradient.isfinite()).sum()",
        "dist.all_reduce(bad)",
        "return bad.item() == 0",
    ),
    ask(
        f"good = torch.tensor(float({ALL}))",
        "dist.all_reduce(good)",
        "return good == dist.get_world_size()",
    ),
]
WRONG = [
    (finish(UNSCALE, AVERAGE, CLIP), "an infinity on rank 0 of 3: on rank 1"),
    (finish(AVERAGE, CLIP, UNSCALE), "gradients [[0.3, 0.0, 0.2]]: the weights of rank 0"),
    (finish(AVERAGE, UNSCALE), "gradients [[30.0, 40.0, 0.0]]"),
    (finish(UNSCALE, CLIP), "gradients [[0.3, 0.0, 0.2], [0.0, 0.4, 0.2]]"),
    (finish(UNSCALE, CLIP, AVERAGE), "gradients [[60.0, 0.0, 0.0], [0.0, 80.0, 0.0]]"),
    (
        finish(
            f"if all(p.grad.isfinite().all() for p in model.parameters()): {AVERAGE}",
            UNSCALE,
            CLIP,
        ),
        "rank 0 returned while ranks 1 and 2 still waited",
    ),
    (finish(AVERAGE, "..."), "a `...` is left to fill in"),
    (ask(f"return {ALL}"), "what rank 0 says: True, expected False"),
    (ask("return True"), "expected False"),
    (
        ask(
            f"if {ALL}:", "    return True", "dist.all_reduce(torch.ones(1))", "return False"
        ),
        "ranks 0 and 2 returned while rank 1 still waited",
    ),
    (
        ask("for gradient in gradients:", "    dist.all_reduce(gradient)", f"return {ALL}"),
        "rank",
    ),
    (
        ask(
            "total = sum(gradient.sum() for gradient in gradients) + torch.zeros(())",
            "dist.all_reduce(total)",
            "return total != float('inf')",
        ),
        "expected False",
    ),
    (
        ask(
            f"bad = torch.tensor(float(not {ALL}))", "dist.all_reduce(bad, dist.ReduceOp.MAX)"
        ),
        "nothing was returned",
    ),
]


test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG)
