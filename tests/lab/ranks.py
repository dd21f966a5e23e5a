"""Workers that several tests launch, or programs and kernels of their own."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from mgpu_tutorial.lab import launch


def total(rank, world_size):
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return value.item()


def note(path, pid):
    """Write `pid` to the file `path`, which is there whole or not at all."""
    draft = os.path.join(os.path.dirname(path), f"draft-{pid}")
    with open(draft, "w") as file:
        file.write(str(pid))
    os.replace(draft, path)


def launch_ten_in_three_threads():
    with ThreadPoolExecutor(3) as pool:
        return [*pool.map(lambda size: launch(total, size).results, [3] * 10)]


def sleeper(rank, world_size, marker=""):
    if marker:
        note(f"{marker}.{rank}", os.getpid())
    time.sleep(60)


def on_device(rank, world_size):
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return str(value.device), dist.get_backend(), value.item()


def cuda_tensor(rank, world_size):
    return torch.ones(2, device="cuda")
