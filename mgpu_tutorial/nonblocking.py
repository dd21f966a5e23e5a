"""Non-blocking: start a transfer now, work meanwhile, wait for it later."""

import time

import torch
import torch.distributed as dist

from mgpu_tutorial.lab import span


def start_and_wait(rank: int, world_size: int) -> None:
    """Rank 0 starts a send, rank 1 a receive; the value is there after wait, not before."""
    value = torch.zeros(1)
    if rank == 0:
        value += 1
        work = dist.isend(value, dst=1)
        print("the send has started")
    else:
        work = dist.irecv(value, src=0)
        print("the receive has started")
    work.wait()
    print(f"after wait: {value.item():g}")


def exchange(rank: int, world_size: int) -> float:
    """Two ranks send to each other at once, without a deadlock; returns the other's value."""
    mine, other = torch.tensor([float(rank)]), torch.zeros(1)
    peer = 1 - rank
    sending = dist.isend(mine, dst=peer)
    dist.recv(other, src=peer)
    sending.wait()
    return other.item()


def overwritten(rank: int, world_size: int, receiver_is_late: bool) -> float | None:
    """Rank 0 overwrites 1 by 2 between isend and wait; rank 1 returns what arrived."""
    buffer = torch.ones(1)
    pause = 0.3
    if rank == 0:
        if not receiver_is_late:
            time.sleep(pause)  # let the receiver be first
        sending = dist.isend(buffer, dst=1)
        if not receiver_is_late:
            time.sleep(pause)  # let the transfer end
        buffer.fill_(2)  # wrong: before the wait
        sending.wait()
        return None
    if receiver_is_late:
        time.sleep(2 * pause)
    dist.recv(buffer, src=0)
    return buffer.item()


def waited(rank: int, world_size: int, receiver_is_late: bool) -> float | None:
    """The same with the wait before the overwriting: rank 1 always receives 1."""
    buffer = torch.ones(1)
    if rank == 0:
        dist.isend(buffer, dst=1).wait()
        buffer.fill_(2)
        return None
    if receiver_is_late:
        time.sleep(0.3)
    dist.recv(buffer, src=0)
    return buffer.item()


def compute(steps: int, size: int = 128) -> torch.Tensor:
    """Multiply matrices of (size, size) `steps` times: work that keeps one core busy."""
    matrix = torch.eye(size)
    for _ in range(steps):
        matrix = matrix @ torch.eye(size)
    return matrix


def blocked(rank: int, world_size: int, steps: int) -> float:
    """Rank 1 computes, then receives; rank 0 sends, then computes. Returns the seconds."""
    return send_and_compute(rank, steps, overlap=False)


def overlapped(rank: int, world_size: int, steps: int) -> float:
    """The same, but rank 0 computes while its send is on the way. Returns the seconds."""
    return send_and_compute(rank, steps, overlap=True)


def send_and_compute(rank: int, steps: int, overlap: bool) -> float:
    """Send 1 MB from rank 0 to rank 1 and compute on both, at the same time or in turn."""
    value = torch.ones(250_000)  # 1 MB
    dist.barrier()
    begin = time.perf_counter()
    if rank == 1:
        with span("compute"):
            compute(steps)
        dist.recv(value, src=0)
    else:
        sending = dist.isend(value, dst=1)
        if not overlap:
            sending.wait()
        with span("compute"):
            compute(steps)
        if overlap:
            sending.wait()
    return time.perf_counter() - begin


def neighbours(rank: int, world_size: int) -> list[float]:
    """Each rank exchanges its number with both neighbours of the ring, in one batch."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    mine = torch.tensor([float(rank)])
    from_left, from_right = torch.zeros(1), torch.zeros(1)
    batch = [
        dist.P2POp(dist.isend, mine, right, tag=1),
        dist.P2POp(dist.isend, mine, left, tag=2),
        dist.P2POp(dist.irecv, from_left, left, tag=1),
        dist.P2POp(dist.irecv, from_right, right, tag=2),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return [from_left.item(), from_right.item()]
