"""How close does the ring of the notebook on collectives come to gloo's own all_reduce?

    python benchmarks/ring_all_reduce.py [--ranks 4] [--repeats 11]

Ring, naive and gloo run in turns inside the same ranks; the ratio is the median over
the turns of gloo's time by the ring's, so 1 means equally fast and 0.8 that the ring
needs a quarter more. Prints a row a size, and the alpha and beta of the ring.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from common import median_ms, options, ratio

from mgpu_tutorial.collectives import ring
from mgpu_tutorial.collectives.figures import fit_link
from mgpu_tutorial.lab import Table, launch, progress
from mgpu_tutorial.lab.measure import in_turns

SIZES = [2**k for k in range(20, 27)]
METHODS = [ring.ring_all_reduce, ring.naive_all_reduce, dist.all_reduce]


def race(rank: int, world_size: int, turns: int) -> dict[int, dict[str, list[float]]]:
    """For each size the seconds of each method in each turn, until the last rank is done."""

    def until_all_have(method: Callable, tensor: torch.Tensor) -> None:
        method(tensor)
        dist.barrier()

    seconds = {}
    for size in progress(SIZES):
        tensor = torch.full((size // 4,), 0.0)
        actions = {m.__name__: partial(until_all_have, m, tensor) for m in METHODS}
        seconds[size] = in_turns(actions, turns)
    return seconds


def main() -> None:
    given = options(__doc__, ranks=4, repeats=11)
    report = launch(race, given.ranks, given.repeats, device="cpu", timeout=600)
    rows, ring_seconds = [], []
    for size, seconds in report.results[0].items():
        by_ring, by_naive, by_gloo = seconds.values()
        ring_seconds.append(statistics.median(by_ring))
        ratios = ratio(by_gloo, by_ring), ratio(by_naive, by_ring)
        milliseconds = [median_ms(taken, digits=2) for taken in seconds.values()]
        rows.append([f"{size >> 20} MiB", *milliseconds, *ratios])
    header = ["size", "ring ms", "naive ms", "gloo ms", "gloo / ring", "naive / ring"]
    print(f"{given.ranks} ranks on one machine, gloo on CPU, {given.repeats} turns")
    print(Table(header, rows))
    alpha, beta = fit_link(SIZES, ring_seconds, given.ranks)
    print(f"ring: alpha {alpha * 1e6:.0f} µs a message, beta {beta / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
