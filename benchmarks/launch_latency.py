"""How long until four ranks have run one all_reduce? Four ways to start them.

    python benchmarks/launch_latency.py [--repeats 15]

Ways that are as fast run in turns, so that a busy machine slows both alike.
Prints medians and the ratio to `launch`; needs half a minute on two cores. A bare `os.fork`
of this process is the floor: it sends no function and returns nothing, and nobody watches
its ranks. It is taken twice, the second time after this process has imported what the fork
server holds ready for the ranks (DDP, pipelines, torchvision): a larger process takes longer
to fork and to end.
"""

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mgpu_tutorial.lab import Table, launch
from mgpu_tutorial.lab.measure import in_turns
from mgpu_tutorial.lab.run import server

RANKS = 4


def worker(rank: int, world_size: int) -> float:
    """Add the rank numbers up."""
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return value.item()


def spawned(rank: int, path: str) -> None:
    """The same, with everything that mp.spawn leaves to its worker."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    assert worker(rank, RANKS) == 6
    dist.destroy_process_group()


def by_launch() -> None:
    assert launch(worker, RANKS, device="cpu").results == [6.0] * RANKS


def by_fork() -> None:
    """Four forks of this process, which has imported torch; the parent only waits."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(RANKS):
            children.append(os.fork())
            if children[-1] == 0:
                forked(rank, f"{folder}/meet")
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * RANKS


def forked(rank: int, path: str) -> None:
    """What one fork does, from its first line to its last."""
    code = 1
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        torch.set_num_threads(1)
        store = dist.FileStore(path, RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        code = int(worker(rank, RANKS) != 6)
    finally:
        os._exit(code)


def by_spawn() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(spawned, (f"{folder}/meet",), nprocs=RANKS)


def by_torchrun() -> None:
    torchrun = Path(sys.executable).parent / "torchrun"
    with tempfile.TemporaryDirectory() as folder:
        command = [torchrun, "--standalone", "--local-addr=127.0.0.1", "--log-dir", folder]
        command += [f"--nproc-per-node={RANKS}"]
        command += [__file__, "--as-rank"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def as_rank() -> None:
    """What one process does that torchrun started."""
    dist.init_process_group("gloo")
    assert worker(dist.get_rank(), RANKS) == 6
    dist.destroy_process_group()


def rows_of(times: dict[str, list[float]], launches: list[float]) -> list[list[object]]:
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    one = statistics.median(launches)
    return [
        [name, len(times[name]), round(seconds, 3), f"{seconds / one:.2f}"]
        for name, seconds in medians.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--repeats", type=int, default=15, help="launches (slow ways: a fifth)"
    )
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.as_rank:
        return as_rank()
    (first,) = in_turns({"first": by_launch}, 1)["first"]  # starts the fork server
    times = in_turns({"launch": by_launch, "a bare fork": by_fork}, given.repeats)
    slow = {"mp.spawn": by_spawn, "torchrun": by_torchrun}
    times |= in_turns(slow, max(1, given.repeats // 5))
    for module in server.PRELOAD:
        importlib.import_module(module)
    large = {"launch": by_launch, "the same imports": by_fork}
    again = in_turns(large, given.repeats)
    rows = rows_of(times, times["launch"]) + rows_of(again, again["launch"])
    print(Table(["four ranks, one all_reduce", "runs", "median s", "times launch"], rows))
    print(f"the first launch, which starts the fork server: {first:.1f} s")


if __name__ == "__main__":
    main()
