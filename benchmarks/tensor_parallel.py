"""Tensor parallel by model size: ours beside PyTorch's parallelize_module.

    python benchmarks/tensor_parallel.py [--ranks 2] [--steps 10] [--repeats 3]

Both run a stack of blocks forward and backward, in turns inside the same ranks. Prints the
median milliseconds of each, and how many times as long as PyTorch's ours takes (the median
over all turns of the ratio of the two in one turn).
"""

from functools import partial

import torch
import torch.distributed as dist
from common import all_turns, median_ms, options, ratio, show
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from mgpu_tutorial.lab.measure import in_turns
from mgpu_tutorial.tensor_parallel.block import Block, parallelize

SIZES = {  # width, heads and depth, and the sequences and tokens of a batch
    "0.2 MB": ((48, 4, 2), (4, 16)),
    "3 MB": ((128, 4, 4), (4, 32)),
    "28 MB": ((384, 8, 4), (4, 64)),
    "85 MB": ((768, 8, 3), (4, 64)),
}
PLAN = {
    "attention.qkv": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}
COLUMNS = ("ms", "of PyTorch", "ratio")


def by_torch(block: Block) -> Block:
    return parallelize_module(block, init_device_mesh("cpu", (dist.get_world_size(),)), PLAN)


WAYS = {"ours": parallelize, "PyTorch's": by_torch}


def time_ways(
    rank: int, world_size: int, model: tuple, batch: tuple[int, int], steps: int
) -> dict[str, list[tuple[float, float]]]:
    """The seconds of each way's forward and of its backward, in turns."""
    width, heads, depth = model
    stacks = {
        name: nn.Sequential(*(way(Block(width, heads)) for _ in range(depth)))
        for name, way in WAYS.items()
    }
    x, outputs = torch.randn(*batch, width), {}

    def forward(name: str) -> None:
        outputs[name] = stacks[name](x)

    def backward(name: str) -> None:
        stacks[name].zero_grad()
        outputs.pop(name).sum().backward()

    parts = forward, backward
    actions = {(part, name): partial(part, name) for name in WAYS for part in parts}
    seconds = in_turns(actions, steps, warm_up=2)
    return {name: list(zip(*(seconds[p, name] for p in parts), strict=True)) for name in WAYS}


def main() -> None:
    given = options(__doc__, ranks=2, steps=10, repeats=3)
    rows = []
    for size, (model, batch) in SIZES.items():
        turns = all_turns(given, time_ways, model, batch, given.steps)
        row: list[object] = [size]
        for ours, theirs in zip(
            *(zip(*turns[name], strict=True) for name in WAYS), strict=True
        ):
            row += [median_ms(ours), median_ms(theirs), ratio(ours, theirs)]
        rows.append(row)
    head = [f"{part} {what}" for part in ("forward", "backward") for what in COLUMNS]
    show(given, ["parameters", *head], rows)


if __name__ == "__main__":
    main()
