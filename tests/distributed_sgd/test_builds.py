"""The builds take right answers in any dress, and no wrong one."""

from mgpu_tutorial.distributed_sgd.builds import build
from tests.builds import right_and_wrong

IMPORTS = """\
import torch
import torch.distributed as dist
from torch.nn.functional import nll_loss
"""


def average(*lines):
    body = "\n        ".join(lines)
    return (
        f"{IMPORTS}\ndef average_gradients(model):\n"
        f"    world_size = dist.get_world_size()\n"
        f"    for parameter in model.parameters():\n        {body}\n"
    )


TOGETHER = f"""{IMPORTS}
def average_gradients(model):
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))
"""
GATHERED = average(
    "every = [torch.empty_like(parameter.grad) for _ in range(world_size)]",
    "dist.all_gather(every, parameter.grad)",
    "parameter.grad = sum(every) / world_size",
)
SUM = "dist.all_reduce(parameter.grad)"


def loss(*lines):
    body = "\n    ".join(lines)
    return f"{IMPORTS}\ndef shared_loss(output, labels, batch):\n    {body}\n"


SUMMED = 'nll_loss(output, labels, reduction="sum")'
RIGHT = [
    average("parameter.grad /= world_size", SUM),
    GATHERED,
    TOGETHER,
    loss(f"return dist.get_world_size() * {SUMMED} / batch"),
    loss(
        "each = -output[range(len(labels)), labels]",
        "return each.sum() * dist.get_world_size() / batch",
    ),
    loss(
        "if len(labels) == 0:",
        "    return output.sum()",
        "share = len(labels) / batch",
        "return nll_loss(output, labels) * share * dist.get_world_size()",
    ),
]
WRONG = [
    (average(SUM), "rank 0 of 2: the gradient of the weight: [4, 40]"),
    (average(SUM, "parameter.grad /= 2"), "rank 0 of 1: the gradient of the weight"),
    (average("parameter.grad /= world_size"), "rank 0 of 2: the gradient of the weight"),
    (average(SUM, "gradient = parameter.grad / world_size"), "rank 0 of 2"),
    (
        average("if parameter.dim() > 1:", f"    {SUM}", "    parameter.grad /= world_size"),
        "rank 0 of 2: the gradient of the bias",
    ),
    (
        average(SUM, "parameter.grad /= world_size", "parameter.data -= parameter.grad"),
        "the parameters",
    ),
    (average("if dist.get_rank() == 0:", f"    {SUM}"), "rank 1"),
    (average("..."), "a `...` is left to fill in"),
    (loss("return nll_loss(output, labels)"), "shares of 4 and 3"),
    (loss(f"return {SUMMED}"), "of losses 1 to 7: 28, expected 4"),
    (loss(f"return {SUMMED} / batch"), "the ranks' average"),
    (loss("return nll_loss(output, labels) * len(labels) / batch"), "the ranks' average"),
    (
        loss(
            "share = len(labels) / batch",
            "return nll_loss(output, labels) * share * dist.get_world_size()",
        ),
        "the loss of rank 1: nan, expected 0",
    ),
    (
        loss(
            "if len(labels) == 0:",
            "    return torch.zeros(())",
            f"return {SUMMED} * dist.get_world_size() / batch",
        ),
        "the 0 isn't computed from `output`",
    ),
    (loss(f"{SUMMED} * dist.get_world_size() / batch"), "nothing was returned"),
    (loss(f"return float({SUMMED} * dist.get_world_size() / batch)"), "backward"),
]


test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG)
