"""How long until four ranks have run one all_reduce? Four ways to start them.

    python benchmarks/launch_latency.py [--repeats 15]

A bare `os.fork` of this process, in turns with `launch`, is the floor: it sends no function
and returns nothing, and nobody watches its ranks.
"""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import options

from mgpu_tutorial.lab import Table, launch
from mgpu_tutorial.lab.measure import in_turns

RANKS = 4


def worker(rank: int, world_size: int) -> float:
    """Add the rank numbers up."""
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return value.item()


def joined(rank: int, meeting: str) -> None:
    """The same, with everything that other ways to start ranks leave to their worker."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", meeting, rank=rank, world_size=RANKS)
    assert worker(rank, RANKS) == 6
    dist.destroy_process_group()


def by_fork() -> None:
    """Four forks of this process, which has imported torch; the parent only waits."""
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(RANKS):
            children.append(os.fork())
            if children[-1] == 0:
                try:
                    joined(rank, f"file://{folder}/meet")
                    os._exit(0)
                finally:
                    os._exit(1)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * RANKS


def by_spawn() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(joined, (f"file://{folder}/meet",), nprocs=RANKS)


def by_torchrun() -> None:
    torchrun = Path(sys.executable).parent / "torchrun"
    with tempfile.TemporaryDirectory() as folder:
        command = [torchrun, "--standalone", "--local-addr=127.0.0.1", "--log-dir", folder]
        command += [f"--nproc-per-node={RANKS}", __file__, "--as-rank"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    given = options(__doc__, "as-rank", repeats=15)
    if given.as_rank:  # what a process does that torchrun started
        sys.exit(joined(int(os.environ["RANK"]), "env://"))
    by_launch = partial(launch, worker, RANKS, device="cpu")
    (first,) = in_turns({"first": by_launch}, 1)["first"]  # starts the fork server
    times = in_turns({"launch": by_launch, "a bare fork": by_fork}, given.repeats)
    slow_ones = {"mp.spawn": by_spawn, "torchrun": by_torchrun}
    times |= in_turns(slow_ones, given.repeats // 5 or 1)
    one, rows = median(times["launch"]), []
    for name, taken in times.items():
        rows.append([name, len(taken), f"{median(taken):.3f}", f"{median(taken) / one:.2f}"])
    print(Table(["four ranks, one all_reduce", "runs", "median s", "times launch"], rows))
    print(f"the first launch, which starts the fork server: {first:.1f} s")
