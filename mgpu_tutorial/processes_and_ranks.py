"""Processes and ranks: what starts, what it is called, and how the ranks find each other."""

import os
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context

import torch
import torch.distributed as dist


def who_am_i(rank: int, world_size: int) -> None:
    """Each rank says its rank, its local rank, the world size, its backend and device."""
    print(f"rank {rank} of {world_size}")
    print(f"local rank {os.environ['LOCAL_RANK']}")
    print(f"backend {dist.get_backend()}")
    print(f"device {torch.get_default_device()}")


def free_port() -> int:
    """A port that nobody on this machine listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def open_store(port: int) -> dist.TCPStore:
    """Rank 0 opens the store for this machine only; else every network could reach it."""
    listener = socket.create_server(("127.0.0.1", port))
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        multi_tenant=True,  # init_process_group finds it, and opens no second one
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def by_environment(rank: int, world_size: int, port: int) -> float:
    """All ranks meet at MASTER_ADDR:MASTER_PORT; returns the seconds it took this one."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    store = None
    if rank == 0:
        time.sleep(0.5)  # late: the others find nobody at the port yet
        store = open_store(port)
    begin = time.perf_counter()
    dist.init_process_group("gloo", init_method="env://")
    del store  # the group has opened the same one, and keeps it
    return time.perf_counter() - begin


def one_too_few(rank: int, world_size: int, port: int, patience: float) -> str:
    """One rank more is announced than comes; returns what PyTorch says after `patience` s."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["WORLD_SIZE"] = str(world_size + 1)
    store = open_store(port) if rank == 0 else None
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=patience))
    except dist.DistError as error:
        return str(error).splitlines()[0]
    return f"all have come to {store}"


def main_worker(local_rank: int, world_size: int, path: str, batch_size: int) -> str:
    """The ranks meet in the file at `path`; each takes its share of the batch."""
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=local_rank, world_size=world_size
    )
    share = batch_size // world_size
    dist.barrier()  # nobody leaves while another still joins
    dist.destroy_process_group()
    return f"{share} of {batch_size} samples per step"


def which_gpu(rank: int, world_size: int) -> str:
    """Each rank looks up which GPU its local rank stands for in CUDA_VISIBLE_DEVICES."""
    visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    local_rank = int(os.environ["LOCAL_RANK"])
    return f"local rank {local_rank}, cuda:{local_rank}, is GPU {visible[local_rank]}"


# Apparatus, not the lesson


def spawn_alone(function: Callable) -> str:
    """Start `function` in a new process by "spawn"; returns the last line of its stderr.

    The child writes to a file, because a notebook does not always show what a child prints
    to the kernel's stderr. PYTHON_COLORS=0 wins over FORCE_COLOR, which Jupyter sets.
    """
    with tempfile.TemporaryFile() as log:
        kept = os.dup(2)
        os.dup2(log.fileno(), 2)
        colours = os.environ.get("PYTHON_COLORS", "")  # an empty one counts as none
        os.environ["PYTHON_COLORS"] = "0"
        try:
            child = get_context("spawn").Process(target=function)
            child.start()
            child.join()
        finally:
            os.environ["PYTHON_COLORS"] = colours
            os.dup2(kept, 2)
            os.close(kept)
        log.seek(0)
        lines = log.read().decode().splitlines() or ["no complaint"]
    return f"exit code {child.exitcode}, {lines[-1].split(' on <')[0]}"
