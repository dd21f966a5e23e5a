"""Workers that the tests launch: most of them misbehave."""

import os
import random
import signal
import socket
import sys
import time

import numpy as np
import psutil
import torch
import torch.distributed as dist

from mgpu_tutorial.lab import launch, progress


def total(rank, world_size):
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return value.item()


def talk(rank, world_size):
    time.sleep(0.05 * (world_size - rank))
    print(f"out {rank}", flush=True)
    print(f"err {rank}", file=sys.stderr)
    os.system(f"echo shell {rank}")


def chatter(rank, world_size, megabytes):
    line = "ünïcode " * 8
    for _ in range(megabytes * 2**20 // len(line.encode())):
        print(line)


def big(rank, world_size):
    return torch.full((12_500_000,), float(rank)) if rank == 0 else None


def silent(rank, world_size):
    pass


def pid(rank, world_size):
    return os.getpid()


def environment(rank, world_size, *names):
    return [os.environ.get(name) for name in names]


def has_imported(rank, world_size, *modules):
    return [module in sys.modules for module in modules]


def settings(rank, world_size):
    drawn = torch.rand(1).item(), random.random(), np.random.rand()
    return torch.get_num_threads(), drawn, dist.get_backend()


def raises(rank, world_size):
    if rank == 1:
        raise ValueError("no such sample")
    dist.barrier()


def raise_differently(rank, world_size):
    if rank == 0:
        raise KeyError("weights")
    if rank == 1:
        raise ZeroDivisionError("empty batch")
    dist.barrier()


def leaves(rank, world_size):
    if rank == 1:
        time.sleep(0.2) or os._exit(3)  # until the guard has looked
    dist.barrier()


def exits(rank, world_size):
    if rank == 1:
        sys.exit(3)
    dist.barrier()


def killed(rank, world_size):
    if rank == 1:
        time.sleep(0.2) or os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def segfault(rank, world_size):
    if rank == 1:
        import ctypes

        ctypes.string_at(0)
    dist.barrier()


def unanswered(rank, world_size):
    if rank == 0:
        print("waiting")
        dist.recv(torch.zeros(1), src=1)
    else:
        time.sleep(60)


def both_send(rank, world_size):
    dist.send(torch.zeros(1), dst=1 - rank)


def early(rank, world_size):
    if rank != 1:
        dist.barrier()


def stops_being_heard(rank, world_size):
    while True:
        pass


def nested(rank, world_size):
    launch(total, 2)


def lock_result(rank, world_size):
    import threading

    return {"loss": 0.5, "lock": threading.Lock()}


def two_arguments(rank, world_size, data):
    return data


def note(path, pid):
    """Write `pid` to the file `path`, which is there whole or not at all."""
    draft = os.path.join(os.path.dirname(path), f"draft-{pid}")
    with open(draft, "w") as file:
        file.write(str(pid))
    os.replace(draft, path)


def sleeper(rank, world_size, marker=""):
    if marker:
        note(f"{marker}.{rank}", os.getpid())
    time.sleep(60)


def listeners(rank, world_size):
    dist.barrier()
    found = psutil.Process().net_connections(kind="inet")
    result = [c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN]
    result += [c.laddr.ip for c in found if c.type == socket.SOCK_DGRAM]
    dist.barrier()
    return result


def with_children(rank, world_size, marker):
    import subprocess

    child = subprocess.Popen(["sleep", "61"])
    note(f"{marker}.{rank}", child.pid)
    time.sleep(60)


def ends_after(rank, world_size, seconds):
    time.sleep(seconds * rank)


def counts(rank, world_size):
    return sum(progress(range(50)))


def resnet(rank, world_size):
    from mgpu_tutorial.shared.vision import torchvision

    network = torchvision.models.resnet18().eval()
    return tuple(network(torch.zeros(1, 3, 32, 32)).shape)


def on_device(rank, world_size):
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return str(value.device), dist.get_backend(), value.item()


def cuda_tensor(rank, world_size):
    return torch.ones(2, device="cuda")
