"""How long until four ranks have run one all_reduce? Four ways to start them.

    python benchmarks/launch_latency.py [--repeats 15]

Ways that are as fast run in turns, so that a busy machine slows both alike.
Prints medians and the ratio to `launch`; needs half a minute on two cores. A bare `os.fork`
of this process is the floor: it sends no function and returns nothing, and nobody watches
its ranks.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

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


def joined(rank: int, path: str) -> None:
    """The same, with everything that mp.spawn and a fork leave to their worker."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    assert worker(rank, RANKS) == 6


def by_launch() -> None:
    assert launch(worker, RANKS, device="cpu").results == [6.0] * RANKS


def by_fork() -> None:
    """Four forks of this process, which has imported torch; the parent only waits."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(RANKS):
            children.append(os.fork())
            if children[-1] == 0:
                code = 1
                try:
                    joined(rank, f"{folder}/meet")
                    code = 0
                finally:
                    os._exit(code)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * RANKS


def spawned(rank: int, path: str) -> None:
    joined(rank, path)
    dist.destroy_process_group()


def by_spawn() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(spawned, (f"{folder}/meet",), nprocs=RANKS)


def by_torchrun() -> None:
    torchrun = Path(sys.executable).parent / "torchrun"
    with tempfile.TemporaryDirectory() as folder:
        command = [torchrun, "--standalone", "--local-addr=127.0.0.1", "--log-dir", folder]
        command += [f"--nproc-per-node={RANKS}", __file__, "--as-rank"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def as_rank() -> None:
    """What one process does that torchrun started."""
    dist.init_process_group("gloo")
    assert worker(dist.get_rank(), RANKS) == 6
    dist.destroy_process_group()


def main() -> None:
    given = options(__doc__, "as-rank", repeats=15)
    if given.as_rank:
        return as_rank()
    (first,) = in_turns({"first": by_launch}, 1)["first"]  # starts the fork server
    times = in_turns({"launch": by_launch, "a bare fork": by_fork}, given.repeats)
    slow = {"mp.spawn": by_spawn, "torchrun": by_torchrun}
    times |= in_turns(slow, max(1, given.repeats // 5))
    one, rows = statistics.median(times["launch"]), []
    for name, taken in times.items():
        median = statistics.median(taken)
        rows.append([name, len(taken), f"{median:.3f}", f"{median / one:.2f}"])
    print(Table(["four ranks, one all_reduce", "runs", "median s", "times launch"], rows))
    print(f"the first launch, which starts the fork server: {first:.1f} s")


if __name__ == "__main__":
    main()
