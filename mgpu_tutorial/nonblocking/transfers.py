"""Transfers in the background: started, waited for, worked under, and put in a batch."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from mgpu_tutorial.lab import span


def start_and_wait(rank: int, world_size: int, delay: float) -> list[float]:
    """Rank 0 sends `delay` s late; rank 1 returns its seconds in irecv and in wait."""
    value = torch.zeros(1)
    dist.barrier()  # both begin at the same moment
    if rank == 0:
        time.sleep(delay)
        dist.send(value + 1, dst=1)
        return []
    begin = time.perf_counter()
    work = dist.irecv(value, src=0)
    started = time.perf_counter()
    # Only to look: before wait has returned, a program must not read the value.
    print(f"irecv has returned, and the value is {value.item():g}")
    work.wait()
    print(f"wait has returned, and the value is {value.item():g}")
    return [started - begin, time.perf_counter() - started]


def overwrite_early(
    rank: int, world_size: int, recv_after: float, write_after: float
) -> float | None:
    """Rank 0 sends 1 and overwrites it `write_after` s later; rank 1 returns what arrived."""
    buffer = torch.zeros(1)
    dist.barrier()  # both begin at the same moment
    if rank == 1:
        time.sleep(recv_after)
        dist.recv(buffer, src=0)
        return buffer.item()
    buffer.fill_(1)
    sending = dist.isend(buffer, dst=1)
    time.sleep(write_after)
    buffer.fill_(2)  # wrong: the transfer may still need the buffer
    sending.wait()
    return None


def compute(steps: int) -> None:
    """Multiply matrices of 128 x 128, which keeps one core busy."""
    with span("compute"):
        matrix = torch.eye(128)
        for _ in range(steps):
            matrix = matrix @ torch.eye(128)


def work_meanwhile(buffer: Tensor, work: Callable[[], object]) -> object:
    """Send `buffer` from rank 0 to rank 1; both do `work` meanwhile and return its result."""
    if dist.get_rank() == 0:
        transfer = dist.isend(buffer, dst=1)
    else:
        transfer = dist.irecv(buffer, src=0)
    done = work()
    transfer.wait()
    return done


def exchange_with_neighbours(rank: int, world_size: int) -> list[float]:
    """Rank r sends 100 + r to its right and 200 + r to its left, in one batch."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    to_right, to_left = torch.tensor([100.0 + rank]), torch.tensor([200.0 + rank])
    from_left, from_right = torch.zeros(1), torch.zeros(1)
    batch = [
        dist.P2POp(dist.isend, to_right, right),
        dist.P2POp(dist.isend, to_left, left),
        dist.P2POp(dist.irecv, from_left, left),
        dist.P2POp(dist.irecv, from_right, right),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return [from_left.item(), from_right.item()]
