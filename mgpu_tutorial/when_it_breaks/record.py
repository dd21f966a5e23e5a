"""A job as it runs without a launcher like ours: with a time limit, and a flight record."""

import pickle
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
from torch.distributed.distributed_c10d import _world


def run_with_limit(
    rank: int, world_size: int, folder: str, job: Callable, *given: Any, limit: float = 3.0
) -> None:
    """Run `job` in a group whose calls wait for `limit` seconds, and leave a record."""
    if Path(folder, f"rank_{rank}").exists():
        raise ValueError(f"{folder} holds the records of another run: give an empty folder")
    store = dist.FileStore(f"{folder}/store", world_size)
    who = {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit), **who)
    stay = 1.5 * limit  # the others must not lose this rank
    try:
        job(rank, world_size, *given)
        print("has ended")
    except RuntimeError as error:
        print(error)
        stay = 0.5 * limit  # it has waited already
    Path(folder, f"rank_{rank}").write_bytes(flight_record())
    store.set(f"written by {rank}", "")
    with suppress(RuntimeError):
        store.wait([f"written by {r}" for r in range(world_size)], timedelta(seconds=stay))


def flight_record() -> bytes:
    """The flight recorder's buffer in this process, pickled, with the stacks of Python."""
    record = pickle.loads(_dump_fr_trace(True, True, False))
    record["pg_config"] = {  # the groups, which gloo leaves out
        group.group_name: {"desc": group.group_desc, "ranks": str(list(ranks))}
        for group, ranks in _world.pg_group_ranks.items()
        if isinstance(group, dist.ProcessGroup)
    }
    return pickle.dumps(record)
