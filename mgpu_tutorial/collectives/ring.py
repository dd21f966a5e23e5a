"""All-reduce out of send and receive: as a ring, the naive way, and what it costs."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from mgpu_tutorial.lab import note
from mgpu_tutorial.shared.cost_model.links import Link


def ring_all_reduce(
    tensor: torch.Tensor, after_step: Callable[[], None] = lambda: None
) -> None:
    """Sum `tensor` (flat, in place) over all ranks, by way of neighbours only.

    Patarasuk and Yuan, 2009, https://doi.org/10.1016/j.jpdc.2008.09.002.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = tensor.tensor_split(world_size)  # views, not copies
    incoming = torch.empty_like(chunks[0])
    for step in range(2 * (world_size - 1)):
        sending = dist.isend(chunks[(rank - step) % world_size], right)
        target = chunks[(rank - step - 1) % world_size]
        if step < world_size - 1:  # reduce-scatter: what arrives is added
            part = incoming[: len(target)]
            dist.recv(part, left)
            target += part
        else:  # all-gather: what arrives replaces
            dist.recv(target, left)
        sending.wait()
        after_step()


def ring_step_by_step(rank: int, world_size: int) -> list[int]:
    """The ring on one small number per chunk, noted after each step."""
    tensor = torch.full((world_size,), 10**rank)

    def note_chunks() -> None:
        note(" ".join(f"{number:04d}" for number in tensor.tolist()))

    note_chunks()
    ring_all_reduce(tensor, after_step=note_chunks)
    return tensor.tolist()


def naive_all_reduce(tensor: torch.Tensor) -> None:
    """Sum `tensor` (in place) on rank 0 and send the sum to everybody."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.send(tensor, dst=0)
        dist.recv(tensor, src=0)
        return
    incoming = torch.empty_like(tensor)
    for peer in range(1, world_size):
        dist.recv(incoming, src=peer)
        tensor += incoming
    for peer in range(1, world_size):
        dist.send(tensor, dst=peer)


def reduce_by(
    rank: int, world_size: int, method: Callable[[torch.Tensor], None], count: int
) -> torch.Tensor:
    """All-reduce `count` random numbers by one `method`; returns the sum."""
    generator = torch.Generator().manual_seed(rank)
    tensor = torch.randn(count, generator=generator)
    method(tensor)
    return tensor


def naive_seconds(nbytes: float, ranks: int, link: Link) -> float:
    """All tensors into rank 0 and all out again, N - 1 messages at once each time."""
    return 2 * (link.latency + (ranks - 1) * nbytes / link.bandwidth)
