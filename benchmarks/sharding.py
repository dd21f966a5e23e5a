"""The stages of ZeRO by model size: ours, PyTorch's fully_shard, and DDP.

    python benchmarks/sharding.py [--ranks 2] [--steps 10] [--repeats 3]

All take whole steps in turns inside the same ranks. Prints the median step of each.
"""

from functools import partial

import torch
from common import all_turns, median_ms, options, ratio, show
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from mgpu_tutorial.lab.measure import in_turns
from mgpu_tutorial.sharding.stages import Prepared, prepare
from mgpu_tutorial.sharding.zero import shard_parameters
from mgpu_tutorial.shared.models import SmallTransformer

SIZES = {
    "0.1 MB": {"vocabulary": 64, "width": 32, "depth": 2},
    "1 MB": {"vocabulary": 256, "width": 64, "depth": 4},
    "6 MB": {"vocabulary": 256, "width": 160, "depth": 5},
    "25 MB": {"vocabulary": 512, "width": 320, "depth": 5},
    "100 MB": {"vocabulary": 512, "width": 640, "depth": 5},
}


def with_adam(model) -> Prepared:
    optimizer = Adam(model.parameters(), lr=0.01)
    return Prepared(model, optimizer, optimizer.step)


def parametrized(module) -> Prepared:
    """The page's first ZeRO 3: each parameter is gathered when it is read."""
    shard_parameters(module)
    return with_adam(module)


def fsdp(module) -> Prepared:
    """PyTorch's ZeRO 3, a block at a time."""
    for block in module.blocks:
        fully_shard(block)
    return with_adam(fully_shard(module))


STAGES = {
    "DDP": lambda module: with_adam(DistributedDataParallel(module)),
    "ShardedOptimizer": partial(prepare, 1),
    "FlatParameters": partial(prepare, 2),
    "shard_parameters": parametrized,
    "ShardedModel": partial(prepare, 3),
    "fully_shard": fsdp,
}


def time_stages(rank: int, world_size: int, model: dict[str, int], steps: int) -> dict:
    """The seconds of each step with each stage, in turns."""
    tokens = torch.randint(model["vocabulary"], (4, 16))

    def step(one: Prepared) -> None:
        one.model.zero_grad()
        one.model(tokens).square().mean().backward()
        one.step()

    actions = {
        name: partial(step, shard(SmallTransformer(**model, tied=False)))
        for name, shard in STAGES.items()
    }
    return in_turns(actions, steps, warm_up=2)


if __name__ == "__main__":
    given = options(__doc__, ranks=2, steps=10, repeats=3)
    rows = []
    for size, model in SIZES.items():
        turns = all_turns(given, time_stages, model, given.steps)
        for name, seconds in turns.items():
            times = ratio(seconds, turns["fully_shard"])
            rows.append([size, name, median_ms(seconds), times])
    show(given, ["parameters", "way", "ms a step", "by fully_shard"], rows)
