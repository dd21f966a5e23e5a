"""A job as it runs without a launcher like ours: with a time limit, and a flight record."""

import os
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from mgpu_tutorial.lab import borrowed


def run_with_limit(
    rank: int, world_size: int, job: Callable, folder: str, limit: float = 5.0
) -> None:
    """Run `job` in a group whose calls wait for `limit` seconds, and leave a record."""
    store = dist.FileStore(f"{folder}/store", world_size)
    who = {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit), **who)
    try:
        job(rank, world_size)
        print("has ended")
    except RuntimeError as error:
        print(error)
    write_record(rank, folder)
    wait_for_records(world_size, folder, 1.5 * limit)  # the others must not lose us


def write_record(rank: int, folder: str) -> None:
    """Write the last calls of this rank, oldest first, as PyTorch's analyser reads them."""
    record = pickle.loads(borrowed.flight_record())
    record["pg_config"] = {  # on gloo it does not name the groups as its entries do
        name: {"name": name, "desc": description, "ranks": str(ranks)}
        for name, description, ranks in borrowed.groups()
    }
    draft = Path(folder, f"draft_{rank}")
    draft.write_bytes(pickle.dumps(record))
    os.replace(draft, Path(folder, f"rank_{rank}"))  # whole or not at all


def wait_for_records(world_size: int, folder: str, seconds: float) -> None:
    """Keep the connections of this rank open until all have written, or for `seconds`."""
    end = time.monotonic() + seconds
    missing = [Path(folder, f"rank_{rank}") for rank in range(world_size)]
    while not all(path.exists() for path in missing) and time.monotonic() < end:
        time.sleep(0.01)
