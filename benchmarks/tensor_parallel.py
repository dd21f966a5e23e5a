"""Tensor parallel by model size: ours beside PyTorch's parallelize_module.

    python benchmarks/tensor_parallel.py [--ranks 2] [--steps 10] [--repeats 3]

Both run a stack of blocks forward and backward, in turns inside the same ranks.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from common import all_turns, both_ways, median_ms, options, ratio, show
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import parallel

from mgpu_tutorial.tensor_parallel import block
from mgpu_tutorial.tensor_parallel.block import Block

SIZES = {  # width, heads and depth, and the sequences and tokens of a batch
    "0.2 MB": ((48, 4, 2), (4, 16)),
    "3 MB": ((128, 4, 4), (4, 32)),
    "28 MB": ((384, 8, 4), (4, 64)),
    "85 MB": ((768, 8, 3), (4, 64)),
}
PLAN = {
    "attention.qkv": parallel.ColwiseParallel(),
    "attention.out": parallel.RowwiseParallel(),
    "mlp.up": parallel.ColwiseParallel(),
    "mlp.down": parallel.RowwiseParallel(),
}


def by_torch(one: Block) -> Block:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallel.parallelize_module(one, mesh, PLAN)


WAYS = {"ours": partial(block.parallelize, plan=block.PLAN), "PyTorch's": by_torch}


def time_ways(
    rank: int, world_size: int, model: tuple, batch: tuple[int, int], steps: int
) -> dict[str, list[tuple[float, float]]]:
    """The seconds of each way's forward and of its backward, in turns."""
    width, heads, depth = model
    x = torch.randn(*batch, width)

    def forward(way: Callable[[Block], Block]) -> Callable[[], torch.Tensor]:
        stack = nn.Sequential(*(way(Block(width, heads)) for _ in range(depth)))
        return lambda: stack(x)

    return both_ways({name: forward(way) for name, way in WAYS.items()}, steps)


if __name__ == "__main__":
    given = options(__doc__, ranks=2, steps=10, repeats=3)
    rows = []
    for size, (model, batch) in SIZES.items():
        turns = all_turns(given, time_ways, model, batch, given.steps)
        parts = (zip(*turns[name], strict=True) for name in WAYS)
        for name, ours, theirs in zip(("forward", "backward"), *parts, strict=True):
            rows.append([size, name, median_ms(ours), median_ms(theirs), ratio(ours, theirs)])
    show(given, ["parameters", "", "ms", "of PyTorch", "ratio"], rows)
