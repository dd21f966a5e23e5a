"""How close does the ring of the notebook on collectives come to gloo's own all_reduce?

    python benchmarks/ring_all_reduce.py [--ranks 4] [--repeats 11]

Ring, naive and gloo run in turns inside the same ranks; the ratio is the median over
the turns of gloo's time by the ring's, so 1 means equally fast and 0.8 that the ring
needs a quarter more. Prints a row a size, and the alpha and beta of the ring.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from mgpu_tutorial import collectives as co
from mgpu_tutorial.collectives.measurements import fit_alpha_beta
from mgpu_tutorial.lab import Table, launch, progress

SIZES = [2**k for k in range(20, 27)]
METHODS = [co.ring_all_reduce, co.naive_all_reduce, dist.all_reduce]


def race(rank: int, world_size: int, repeats: int) -> dict[int, list[list[float]]]:
    """For each size and turn the seconds of each method, one after the other."""
    times: dict[int, list[list[float]]] = {size: [] for size in SIZES}
    for _ in progress(range(repeats)):
        for size in SIZES:
            turn = []
            for method in METHODS:
                tensor = torch.ones(size // 4)
                dist.barrier()
                begin = time.perf_counter()
                method(tensor)
                dist.barrier()
                turn.append(time.perf_counter() - begin)
            times[size].append(turn)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=11)
    given = parser.parse_args()
    report = launch(race, given.ranks, given.repeats, device="cpu", timeout=600)
    rows, ring = [], []
    for size, turns in report.results[0].items():
        medians = [statistics.median(column) * 1e3 for column in zip(*turns, strict=True)]
        ring.append(medians[0] / 1e3)
        to_gloo = statistics.median(turn[2] / turn[0] for turn in turns)
        to_naive = statistics.median(turn[1] / turn[0] for turn in turns)
        row = [f"{size >> 20} MiB", *(round(m, 2) for m in medians)]
        rows.append([*row, f"{to_gloo:.2f}", f"{to_naive:.2f}"])
    header = ["size", "ring ms", "naive ms", "gloo ms", "gloo / ring", "naive / ring"]
    print(f"{given.ranks} ranks on one machine, gloo on CPU, {given.repeats} turns")
    print(Table(header, rows))
    alpha, beta = fit_alpha_beta(SIZES, ring, given.ranks)
    print(f"ring: alpha {alpha * 1e6:.0f} µs a message, beta {beta / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
