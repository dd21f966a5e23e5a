"""Processes and ranks: what starts, what it is called, and how the ranks find each other."""

import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from mgpu_tutorial.lab import Table


def who_am_i(rank: int, world_size: int) -> None:
    """Each rank says its rank, its local rank, the world size, its backend and device."""
    print(f"rank {rank} of {world_size}")
    print(f"local rank {os.environ['LOCAL_RANK']}")
    print(f"backend {dist.get_backend()}")
    print(f"device {torch.get_default_device()}")


def process_id(rank: int, world_size: int) -> int:
    """Each rank returns the number under which the operating system knows it."""
    return os.getpid()


def by_environment(rank: int, world_size: int, port: int) -> str:
    """Rank 0 opens a store at MASTER_ADDR:MASTER_PORT, and all ranks meet there."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    if rank == 0:
        time.sleep(0.3)  # late: the others find nobody at the port yet
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


def by_file(rank: int, world_size: int, path: str) -> str:
    """All ranks write into one file, and meet there; no port is opened for it."""
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=world_size
    )
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


def free_port() -> int:
    """A port that nobody on this machine listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main_worker(
    local_rank: int, world_size: int, path: str, batch_size: int, workers: int, answers
) -> None:
    """The worker that mp.spawn starts: it makes the group and takes its share of the work."""
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=local_rank, world_size=world_size
    )
    batch = batch_size // world_size
    loaders = -(-workers // world_size)  # rounded up
    answers.put(f"rank {dist.get_rank()}: {batch} samples a step, {loaders} loader processes")
    dist.barrier()  # nobody leaves while another still joins
    dist.destroy_process_group()


def which_gpu(rank: int, world_size: int) -> str:
    """Each rank translates its local rank into the number printed on the card."""
    visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    local_rank = int(os.environ["LOCAL_RANK"])
    return f"local rank {local_rank}, cuda:{local_rank}, is GPU {visible[local_rank]}"


def square(number: int) -> int:
    """The map of a map-reduce: one number in, one number out, no rank talks to another."""
    return number * number


def spawn_alone(function: Callable) -> str:
    """Start `function` in a new process by "spawn"; returns the last line of its complaint.

    The child's stderr goes to a file: what a child prints to the kernel's own stderr
    may appear in a notebook, or in the terminal behind it, or nowhere. The complaint has
    no colours: PYTHON_COLORS=0 wins over FORCE_COLOR, which Jupyter sets in its kernels.
    """
    with tempfile.TemporaryFile() as log:
        kept = os.dup(2)
        os.dup2(log.fileno(), 2)
        colours = os.environ.get("PYTHON_COLORS", "")  # an empty one counts as none
        os.environ["PYTHON_COLORS"] = "0"
        try:
            child = multiprocessing.get_context("spawn").Process(target=function)
            child.start()
            child.join()
        finally:
            os.environ["PYTHON_COLORS"] = colours
            os.dup2(kept, 2)
            os.close(kept)
        log.seek(0)
        lines = log.read().decode().splitlines() or ["no complaint"]
    return f"exit code {child.exitcode}, {lines[-1].split(' on <')[0]}"


def _operations(rank: int, world_size: int) -> dict:
    """The operations of a process group by name, each as a call that two ranks can make."""
    device = torch.get_default_device()
    one, two = torch.ones(1, device=device), torch.ones(2, device=device)
    peer, lists = 1 - rank, [torch.ones(1, device=device) for _ in range(world_size)]
    root = lists if rank == 0 else None
    message = dist.send if rank == 0 else dist.recv
    return {
        "send, recv": lambda: message(one, peer),
        "broadcast": lambda: dist.broadcast(one, 0),
        "all_reduce": lambda: dist.all_reduce(one),
        "reduce": lambda: dist.reduce(one, 0),
        "all_gather": lambda: dist.all_gather(lists, one),
        "gather": lambda: dist.gather(one, root, 0),
        "scatter": lambda: dist.scatter(one, root, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(one, list(two.split(1))),
        "all_to_all": lambda: dist.all_to_all(lists, list(two.split(1))),
        "barrier": lambda: dist.barrier(),
    }


def try_operations(rank: int, world_size: int) -> dict[str, bool]:
    """Two ranks call every operation once; returns which of them this backend has."""
    works = {}
    for name, call in _operations(rank, world_size).items():
        try:
            call()
            works[name] = True
        except (RuntimeError, NotImplementedError):
            works[name] = False
    return works


def backends() -> Table:
    """The backends that this PyTorch was built with, and the devices that each serves."""
    built = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    devices = dist.Backend.backend_capability
    rows = [[n, "yes" if b else "no", ", ".join(devices[n])] for n, b in built.items()]
    return Table(["backend", "in this PyTorch", "devices"], rows)
