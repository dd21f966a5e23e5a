"""The stages of ZeRO by model size: ours, PyTorch's fully_shard, and DDP.

    python benchmarks/sharding.py [--ranks 2] [--steps 10] [--repeats 3]

All take their steps in turns inside the same ranks, forward to optimizer. Prints the median
step of each, how many times as long as fully_shard's it takes (the median over all turns of
the ratio of the two steps in one turn), and what a rank holds after a step: parameters,
gradients and Adam's moments.
"""

from functools import partial

import torch
from common import all_turns, median_ms, options, ratio, show
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from mgpu_tutorial.lab.measure import in_turns
from mgpu_tutorial.sharding.figures import held_by
from mgpu_tutorial.sharding.stages import Prepared, zero_1, zero_2, zero_3
from mgpu_tutorial.sharding.zero3 import shard_parameters
from mgpu_tutorial.shared.models import SmallTransformer

SIZES = {  # of a SmallTransformer, and a rank's sequences and tokens
    "0.1 MB": ({"vocabulary": 64, "width": 32, "depth": 2}, (4, 16)),
    "1 MB": ({"vocabulary": 256, "width": 64, "depth": 4}, (4, 16)),
    "6 MB": ({"vocabulary": 256, "width": 160, "depth": 5}, (4, 16)),
    "25 MB": ({"vocabulary": 512, "width": 320, "depth": 5}, (4, 16)),
    "100 MB": ({"vocabulary": 512, "width": 640, "depth": 5}, (4, 16)),
}


def ddp(module) -> Prepared:
    """PyTorch's DDP, with the whole of everything on every rank."""
    model = DistributedDataParallel(module)
    optimizer = Adam(model.parameters(), lr=0.01)
    return Prepared(model, optimizer, optimizer.step)


def parametrized(module) -> Prepared:
    """The page's first ZeRO 3: each parameter is gathered when it is read."""
    shard_parameters(module)
    optimizer = Adam(module.parameters(), lr=0.01)
    return Prepared(module, optimizer, optimizer.step)


def fsdp(module) -> Prepared:
    """PyTorch's ZeRO 3, a block at a time."""
    for block in module.blocks:
        fully_shard(block)
    fully_shard(module)
    optimizer = Adam(module.parameters(), lr=0.01)
    return Prepared(module, optimizer, optimizer.step)


STAGES = {
    "DDP": ddp,
    "ShardedOptimizer": zero_1,
    "FlatParameters": zero_2,
    "shard_parameters": parametrized,
    "ShardedModel": zero_3,
    "fully_shard": fsdp,
}


def time_stages(
    rank: int, world_size: int, model: dict[str, int], batch: tuple[int, int], steps: int
) -> dict[str, list[tuple[float, int]]]:
    """The seconds of each step with each stage, and the bytes that a rank then holds."""
    made = {name: SmallTransformer(**model, tied=False) for name in STAGES}
    prepared = {name: prepare(made[name]) for name, prepare in STAGES.items()}
    tokens = torch.randint(model["vocabulary"], batch)

    def step(one: Prepared) -> None:
        one.model.zero_grad()
        one.model(tokens).square().mean().backward()
        one.step()

    actions = {name: partial(step, one) for name, one in prepared.items()}
    seconds = in_turns(actions, steps, warm_up=2)
    held = {name: sum(held_by(one)) for name, one in prepared.items()}
    return {name: [(taken, held[name]) for taken in seconds[name]] for name in STAGES}


def main() -> None:
    given = options(__doc__, ranks=2, steps=10, repeats=3)
    rows = []
    for size, (model, batch) in SIZES.items():
        turns = all_turns(given, time_stages, model, batch, given.steps)
        seconds = {name: [taken for taken, _ in turns[name]] for name in turns}
        for name, taken in seconds.items():
            times = median_ms(taken), ratio(taken, seconds["fully_shard"])
            rows.append([size, name, *times, f"{turns[name][0][1] / 1e6:.1f}"])
    show(given, ["parameters", "way", "ms a step", "by fully_shard", "MB on a rank"], rows)


if __name__ == "__main__":
    main()
