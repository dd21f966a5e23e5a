"""Do 500 launches, 100 of them failing, leave anything behind?

    python benchmarks/many_launches.py [--launches 500]

Prints what this process holds before and after: resident memory, file descriptors, threads,
children and files of its temporary folder. Fails where one of the counts has grown. Needs two
minutes on two cores.
"""

import argparse
import gc
import os
import sys
import threading
import time
from multiprocessing import util
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from mgpu_tutorial.lab import RankFailed, Table, launch


def worker(rank: int, world_size: int, how: str) -> float:
    """Add the rank numbers up, or fail on rank 1 in one of four ways."""
    if rank == 1 and how == "raise":
        raise ValueError("no such sample")
    if rank == 1 and how == "leave":
        os._exit(0)
    if rank == 1 and how == "die":
        os.abort()
    value = torch.tensor([float(rank)])
    if not (rank == 1 and how == "return early"):
        dist.all_reduce(value)
    return value.item()


def state() -> dict[str, int]:
    """What this process holds now."""
    gc.collect()
    me = psutil.Process()
    return {
        "resident MiB": me.memory_info().rss // 2**20,
        "descriptors": me.num_fds(),
        "threads": threading.active_count(),
        "children": len(me.children(recursive=True)),
        "files": len(list(Path(util.get_temp_dir()).rglob("*"))),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", type=int, default=500)
    given = parser.parse_args()
    ways = ["raise", "leave", "die", "return early"]

    def run(launches: int) -> int:
        failed = 0
        for number in range(launches):
            how = ways[number // 5 % 4] if number % 5 == 0 else "go on"
            try:
                assert launch(worker, 2, how, device="cpu").results == [1.0, 1.0]
            except RankFailed:
                failed += 1
        return failed

    run(20)
    before, begin = state(), time.monotonic()
    failed = run(given.launches)
    seconds, after = time.monotonic() - begin, state()
    rows = [[name, before[name], after[name]] for name in before]
    print(Table([f"{given.launches} launches, {failed} failed", "before", "after"], rows))
    print(f"{seconds:.0f} s")
    counts = [name for name in before if name != "resident MiB"]
    grown = any(after[name] > before[name] for name in counts)
    return int(grown or after["resident MiB"] > before["resident MiB"] + 20)


if __name__ == "__main__":
    sys.exit(main())
