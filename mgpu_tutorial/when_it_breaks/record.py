"""A job as it runs without a launcher like ours: with a time limit, and a flight record."""

import pickle
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d


def run_with_limit(
    rank: int, world_size: int, folder: str, job: Callable, *given: Any, limit: float = 3.0
) -> None:
    """Run `job` in a group whose calls wait for `limit` seconds, and leave a record."""
    store = dist.FileStore(f"{folder}/store", world_size)
    who = {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit), **who)
    stay = 1.5 * limit  # the others must not lose this rank
    try:
        job(rank, world_size, *given)
        print("has ended")
    except RuntimeError as error:
        print(error)
        stay = 0.5 * limit
    Path(folder, f"rank_{rank}").write_bytes(flight_record())
    store.set(f"written by {rank}", "")
    written = [f"written by {other}" for other in range(world_size)]
    with suppress(RuntimeError):
        store.wait(written, timedelta(seconds=stay))


def flight_record() -> bytes:
    """What the flight recorder holds of this process, pickled; with the stacks of Python."""
    record = pickle.loads(_distributed_c10d._dump_fr_trace(True, True, False))
    members = distributed_c10d._world.pg_group_ranks  # with a number where it is no member
    record["pg_config"] = {  # on gloo it does not name the groups as its entries do
        g.group_name: {
            "name": g.group_name,
            "desc": g.group_desc,
            "ranks": str(sorted(ranks)),
        }
        for g, ranks in members.items()
        if isinstance(g, distributed_c10d.ProcessGroup)
    }
    return pickle.dumps(record)
