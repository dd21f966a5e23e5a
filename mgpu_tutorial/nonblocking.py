"""Non-blocking: start a transfer now, work meanwhile, wait for it later."""

import time

import torch
import torch.distributed as dist

from mgpu_tutorial.lab import span


def start_and_wait(rank: int, world_size: int, delay: float) -> list[float]:
    """Rank 1 starts a receive; rank 0 sends `delay` seconds later.

    Rank 1 returns the seconds that it spent in irecv and in wait.
    """
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
    """Rank 0 overwrites 1 with 2 before it waits; rank 1 returns what arrived.

    Rank 1 receives `recv_after` seconds after the start, and rank 0 overwrites
    `write_after` seconds after it.
    """
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


def overwrite_late(
    rank: int, world_size: int, recv_after: float, write_after: float
) -> float | None:
    """The same with the wait before the overwriting: rank 1 always receives 1."""
    buffer = torch.zeros(1)
    dist.barrier()  # both begin at the same moment
    if rank == 1:
        time.sleep(recv_after)
        dist.recv(buffer, src=0)
        return buffer.item()
    buffer.fill_(1)
    sending = dist.isend(buffer, dst=1)
    time.sleep(write_after)
    sending.wait()
    buffer.fill_(2)  # right: the transfer no longer needs the buffer
    return None


def compute(steps: int, size: int = 128) -> torch.Tensor:
    """Multiply matrices of (size, size): work that keeps one core busy."""
    matrix = torch.eye(size)
    for _ in range(steps):
        matrix = matrix @ torch.eye(size)
    return matrix


def send_and_compute(rank: int, world_size: int, steps: int, overlap: bool) -> float:
    """Both ranks compute, and 1 MB goes from 0 to 1; returns the seconds.

    With `overlap` both start the transfer, compute, and wait for it at the end.
    """
    value = torch.ones(250_000)  # 1 MB
    dist.barrier()
    begin = time.perf_counter()
    if overlap:
        work = dist.isend(value, dst=1) if rank == 0 else dist.irecv(value, src=0)
        with span("compute"):
            compute(steps)
        work.wait()
    elif rank == 0:
        dist.send(value, dst=1)
        with span("compute"):
            compute(steps)
    else:
        with span("compute"):
            compute(steps)
        dist.recv(value, src=0)
    return time.perf_counter() - begin


def exchange(rank: int, world_size: int) -> float:
    """Two ranks send to each other at once; returns what the other one had."""
    mine, other = torch.tensor([float(rank)]), torch.zeros(1)
    peer = 1 - rank
    sending = dist.isend(mine, dst=peer)
    dist.recv(other, src=peer)
    sending.wait()
    return other.item()


def exchange_with_neighbours(rank: int, world_size: int) -> list[float]:
    """Each rank swaps numbers with both neighbours of a ring, in one batch."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    mine = torch.tensor([float(rank)])
    from_left, from_right = torch.zeros(1), torch.zeros(1)
    batch = [
        dist.P2POp(dist.isend, mine, right),
        dist.P2POp(dist.isend, mine, left),
        dist.P2POp(dist.irecv, from_left, left),
        dist.P2POp(dist.irecv, from_right, right),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return [from_left.item(), from_right.item()]
