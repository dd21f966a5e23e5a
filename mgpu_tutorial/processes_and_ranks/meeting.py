"""The ranks say who they are and meet: in a script, by four variables, by a file, in vain."""

import os
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def who_am_i(rank: int, world_size: int) -> None:
    """Each rank says its rank, its local rank, the world size, its backend and device."""
    print(f"rank {rank} of {world_size}")
    print(f"local rank {os.environ['LOCAL_RANK']}")
    print(f"backend {dist.get_backend()}")
    print(f"device {torch.get_default_device()}")


def hello() -> None:
    """A whole script for torchrun: meet the others, add up the ranks of all, and leave."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([rank])
    dist.all_reduce(total)
    print(f"rank {rank} of {world_size}, all ranks add up to {total.item()}")
    dist.destroy_process_group()


def by_environment(rank: int, world_size: int, port: int) -> float:
    """All ranks meet at MASTER_ADDR:MASTER_PORT; returns the seconds it took this one."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if rank == 0:
        time.sleep(0.5)  # rank 0 is late, and it is the one that opens the store
    begin = time.perf_counter()
    dist.init_process_group("gloo")
    return time.perf_counter() - begin


def one_too_few(rank: int, world_size: int, port: int, patience: float) -> str:
    """Announces one rank more than comes; returns what PyTorch says after `patience` s."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["WORLD_SIZE"] = str(world_size + 1)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=patience))
    except dist.DistError as error:
        return str(error).splitlines()[0]
    return "all have come"


def which_gpu(rank: int, world_size: int) -> str:
    """Each rank looks up which GPU its local rank stands for in CUDA_VISIBLE_DEVICES."""
    visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    local_rank = int(os.environ["LOCAL_RANK"])
    return f"local rank {local_rank}, cuda:{local_rank}, is GPU {visible[local_rank]}"


def main_worker(local_rank: int, world_size: int, path: str, numbers: list[int]) -> int:
    """The ranks meet in the file at `path`, and all add up the sums of their shares."""
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=local_rank, world_size=world_size
    )
    numbers = torch.tensor(numbers)  # one dtype on all ranks, even if a share is empty
    share = numbers[local_rank::world_size]
    total = share.sum()
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def free_port() -> int:
    """A port that nobody on this machine listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
