"""The course's wrappers and torch's DDP by model size, from latency-bound to bandwidth-bound.

    python benchmarks/ddp_steps.py [--ranks 2] [--steps 15] [--repeats 5]

All take their steps in turns inside the same ranks; over the slow network a message waits for
1 ms and 100 MB/s, and a layer's backward for 3 ms. Prints the median step of each.
"""

import time
from contextlib import nullcontext
from functools import partial

import torch
from common import all_turns, median_ms, options, ratio, show
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets import experiments
from mgpu_tutorial.ddp_buckets.experiments import Tower
from mgpu_tutorial.lab.measure import in_turns
from mgpu_tutorial.shared.cost_model.links import Link, ring_seconds
from mgpu_tutorial.shared.slow_link import slow_link

SIZES = {  # a Tower, its batch, and the MiB of a bucket that holds a few of its layers
    "0.1 MiB in 50 parameters": (32, 24, 8, 0.02),
    "1.5 MiB in 50 parameters": (128, 24, 16, 0.3),
    "6 MiB in 14 parameters": (512, 6, 64, 1.0),
    "24 MiB in 14 parameters": (1024, 6, 64, 4.0),
    "64 MiB in 10 parameters": (2048, 4, 32, 16.0),
    "2 MiB over a slow network": (256, 8, 8, 0.5),
}
LINK = Link(1e-3, 100e6)


def time_steps(
    rank: int, world_size: int, numbers: tuple, steps: int, is_slow: bool
) -> dict[str, list[float]]:
    """The seconds of each step with each wrapper, in turns, after two that do not count."""
    width, depth, batch, bucket_cap_mb = numbers
    inputs = torch.randn(batch, width)
    network = slow_link(lambda nbytes: ring_seconds(nbytes, world_size, LINK))

    def step(model) -> None:
        model.zero_grad()
        model(inputs).square().mean().backward()
        experiments.finish_gradient_synchronization(model)

    actions = {}
    for wrapper, named in experiments.WRAPPERS.items():
        model = wrapper(Tower(width, depth), **dict.fromkeys(named, bucket_cap_mb))
        for layer in model.module.body if is_slow else []:
            layer.register_full_backward_pre_hook(lambda layer, gradient: time.sleep(3e-3))
        if is_slow and wrapper is DistributedDataParallel:  # C++ calls are not slowed
            model.register_comm_hook(None, allreduce_hook)
        actions[wrapper.__name__] = partial(step, model)
    with network if is_slow else nullcontext():
        return in_turns(actions, steps, warm_up=2)


if __name__ == "__main__":
    given = options(__doc__, ranks=2, steps=15, repeats=5)
    rows = []
    for size, numbers in SIZES.items():
        turns = all_turns(given, time_steps, numbers, given.steps, "slow" in size)
        for name, seconds in turns.items():
            times = ratio(seconds, turns["DistributedDataParallel"])
            rows.append([size, name, median_ms(seconds), times])
    show(given, ["gradients", "wrapper", "ms a step", "by torch's DDP"], rows)
