"""A job as it runs without a launcher like ours: with a time limit, and a flight record."""

import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mgpu_tutorial.lab import borrowed


def run_with_limit(
    rank: int, world_size: int, folder: str, job: Callable, *given: Any, limit: float = 5.0
) -> None:
    """Run `job` in a group whose calls wait for `limit` seconds, and leave a record."""
    store = dist.FileStore(f"{folder}/store", world_size)
    who = {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit), **who)
    try:
        job(rank, world_size, *given)
        print("has ended")
    except RuntimeError as error:
        print(error)
    write_record(rank, folder)
    store.set(f"written by {rank}", "")  # stay until all have: the others must not lose us
    store.wait([f"written by {other}" for other in range(world_size)])


def write_record(rank: int, folder: str) -> None:
    """Write the last calls of this rank, oldest first, as PyTorch's analyser reads them."""
    record = pickle.loads(borrowed.flight_record())
    record["pg_config"] = {  # on gloo it does not name the groups as its entries do
        name: {"name": name, "desc": description, "ranks": str(ranks)}
        for name, description, ranks in borrowed.groups()
    }
    Path(folder, f"rank_{rank}").write_bytes(pickle.dumps(record))
