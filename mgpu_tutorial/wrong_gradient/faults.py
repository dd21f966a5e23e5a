"""Eight silent faults of large libraries as lines of the job; the job with one of them."""

from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist

from mgpu_tutorial.wrong_gradient import job
from mgpu_tutorial.wrong_gradient.seeds import hidden


class Fault(NamedTuple):
    """What is wrong, as a line of the job and what stands there instead; two plans to try."""

    what: str
    report: str
    right: str
    wrong: str
    plans: tuple[str, str]  # the second takes twice the ranks


TITAN = "https://github.com/pytorch/torchtitan"
TUTORIAL = (
    "https://github.com/pytorch/tutorials/blob/9e3b07937d1cc1e492f2c04172a254d8cd96358d"
)
FAULTS = {
    "times micro": Fault(
        "nobody divides by the number of micro-batches",
        "https://github.com/deepspeedai/DeepSpeed/issues/7773",
        "y = total / tokens * copies ",
        "y = total / tokens * copies * len(parts) ",
        ("dp=1,pp=2", "dp=2,pp=2"),
    ),
    "last only": Fault(
        "only the last micro-batch counts",
        "https://github.com/NVIDIA-NeMo/Automodel/pull/3530",
        "y.backward(gradient)",
        "stage.zero_grad(), y.backward(gradient)",
        ("dp=1,pp=2", "dp=2,pp=2"),
    ),
    "sum": Fault(
        "backward begins at the sum over tokens",
        f"{TITAN}/issues/2972",
        "y = total / tokens * copies ",
        "y = total * copies ",
        ("dp=1,pp=2", "dp=2,pp=2"),
    ),
    "means": Fault(
        "the mean of the micro-batches' means",
        "https://github.com/huggingface/transformers/pull/34191",
        "y = total / tokens * copies ",
        "y = total / (targets != NOTHING).sum() / len(parts) ",
        ("dp=1,pp=2", "dp=2,pp=2"),
    ),
    "scaled again": Fault(
        "every stage divides by the number of micro-batches once more",
        "https://github.com/deepspeedai/DeepSpeed/pull/8154",
        "dist.send(x.grad, ranks[me - 1])",
        "dist.send(x.grad / len(parts), ranks[me - 1])",
        ("dp=1,pp=2", "dp=2,pp=2"),
    ),
    "no f": Fault(
        "backward of a product forgets the other ranks",
        f"{TITAN}/issues/1805",
        "linear(Copy.apply(x, self.group), self.weight, self.bias)",
        "linear(x, self.weight, self.bias)",
        ("tp=2", "tp=4"),
    ),
    "bias": Fault(
        "each rank adds the bias to its part of a sum",
        f"{TITAN}/pull/2106",
        "Sum.apply(linear(part, self.weight), self.group) + self.bias",
        "Sum.apply(linear(part, self.weight, self.bias), self.group)",
        ("tp=2", "tp=4"),
    ),
    "own order": Fault(
        "every rank adds up in an order of its own",
        f"{TUTORIAL}/intermediate_source/dist_tuto.rst",
        'dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())',
        'add_in_own_order(parameter.grad, group=mesh["dp"].get_group())',
        ("dp=2", "dp=4"),
    ),
}


def add_in_own_order(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The sum over a group, begun on every rank with its own part and those of its left."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    parts = [torch.empty_like(tensor) for _ in range(ranks)]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    for distance in range(1, ranks):
        tensor += parts[(me - distance) % ranks]


def job_with(fault: str) -> ModuleType:
    """The job with one of FAULTS, or a hidden one ("seed 1" to "seed 8"), or none."""
    if not fault:
        return job
    pair = FAULTS[fault] if fault in FAULTS else hidden(fault)
    text = Path(job.__file__).read_text("utf-8")
    if text.count(pair.right) != 1:
        raise ValueError(f"not once in job.py: {pair.right!r}. Change the fault too")
    faulty = ModuleType(f"{job.__name__}_with_a_fault")
    faulty.add_in_own_order = add_in_own_order
    code = compile(text.replace(pair.right, pair.wrong), job.__file__, "exec")
    exec(code, vars(faulty))
    return faulty
