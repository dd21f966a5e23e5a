"""How close does the ring of the notebook on collectives come to gloo's own all_reduce?

    python benchmarks/ring_all_reduce.py [--ranks 4] [--turns 11]

Ring, naive and gloo run in turns inside the same ranks. A ratio of 1 means equally fast.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from common import all_turns, median_ms, options, ratio, show

from mgpu_tutorial.collectives import ring
from mgpu_tutorial.lab.measure import in_turns

SIZES = [2**k for k in range(20, 27)]
METHODS = [ring.ring_all_reduce, ring.naive_all_reduce, dist.all_reduce]


def race(rank: int, world_size: int, turns: int) -> dict[tuple, list[float]]:
    """For each size the seconds of each method in each turn, until the last rank is done."""

    def until_all_have(method: Callable, tensor: torch.Tensor) -> None:
        method(tensor)
        dist.barrier()

    actions = {}
    for size in SIZES:
        for method in METHODS:
            action = partial(until_all_have, method, torch.zeros(size // 4))
            actions[size, method.__name__] = action
    return in_turns(actions, turns)


if __name__ == "__main__":
    given = options(__doc__, ranks=4, repeats=1, turns=11)
    seconds, rows = all_turns(given, race, given.turns), []
    for size in SIZES:
        by_ring, by_naive, by_gloo = times = [seconds[size, m.__name__] for m in METHODS]
        ratios = ratio(by_gloo, by_ring), ratio(by_naive, by_ring)
        rows.append([f"{size >> 20} MiB", *map(median_ms, times), *ratios])
    show(given, ["size", "ring ms", "naive ms", "gloo ms", "gloo/ring", "naive/ring"], rows)
