"""Messages between two ranks: sent and received, misunderstood, or waited for in vain."""

import time

import torch
import torch.distributed as dist
from torch import Tensor


def blocking(rank: int, world_size: int) -> None:
    """Rank 0 sends one number to rank 1; both print what they hold before and after."""
    value = torch.zeros(1)
    if rank == 0:
        value += 1
    print(f"before: {value.item():g}")
    if rank == 0:
        dist.send(value, dst=1)
    elif rank == 1:
        dist.recv(value, src=0)
    print(f"after:  {value.item():g}")


def into_buffer(rank: int, world_size: int, sent: Tensor, buffer: Tensor) -> None:
    """Rank 0 sends one tensor, rank 1 receives into another."""
    if rank == 0:
        dist.send(sent, dst=1)
    else:
        dist.recv(buffer, src=0)
        print(buffer)


def from_anybody(rank: int, world_size: int) -> None:
    """Every rank sends its square to rank 0, which takes them as they come."""
    if rank > 0:
        dist.send(torch.tensor([rank**2]), dst=0)
        return
    heard = {}
    for _ in range(world_size - 1):
        value = torch.zeros(1, dtype=torch.int64)
        sender = dist.recv(value)  # no src: from anybody
        heard[sender] = value.item()
    print(dict(sorted(heard.items())))


def tags(rank: int, world_size: int) -> None:
    """Rank 0 sends 10 with tag 1 and 20 with tag 2; rank 1 asks for tag 2 first."""
    if rank == 0:
        sent = [dist.isend(torch.tensor([10 * tag]), dst=1, tag=tag) for tag in (1, 2)]
        for work in sent:
            work.wait()
        return
    for tag in (2, 1):
        value = torch.zeros(1, dtype=torch.int64)
        dist.recv(value, src=0, tag=tag)
        print(f"tag {tag}: {value.item()}")


def late_receiver(
    rank: int, world_size: int, delay: float, busy: float = 0.0, elements: int = 1
) -> float:
    """Rank 1 asks `delay` s late, waits `busy` s after that; returns each rank's seconds."""
    tensor = torch.zeros(elements)
    dist.barrier()  # both begin together
    begin = time.perf_counter()
    if rank == 0:
        dist.send(tensor, dst=1)
    else:
        time.sleep(delay)
        receiving = dist.irecv(tensor, src=0)  # asks, and goes on
        time.sleep(busy)
        receiving.wait()  # returns once the message is here
    return time.perf_counter() - begin


def swap(mine: Tensor, peer: int) -> Tensor:
    """Exchange tensors of one shape and dtype with `peer`: the lower rank sends first.

    The peer has to name this rank too, which neither of the two can see: else both wait until
    their time is up.
    """
    mine = mine.contiguous()  # gloo sends no other order of memory
    other = torch.empty_like(mine)
    if dist.get_rank() < peer:
        dist.send(mine, dst=peer)
        dist.recv(other, src=peer)
    else:
        dist.recv(other, src=peer)
        dist.send(mine, dst=peer)
    return other


def pass_along(rank: int, world_size: int) -> float:
    """A token goes once around the ring; each rank adds its number. Returns what it saw."""
    token = torch.zeros(1)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    if rank == 0:  # rank 0 opens the ring: if all received first, nobody would send
        dist.send(token, dst=right)
        dist.recv(token, src=left)
    else:
        dist.recv(token, src=left)
        token += rank
        dist.send(token, dst=right)
    return token.item()
