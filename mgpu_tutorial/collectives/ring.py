"""All-reduce out of send and receive: as a ring and the naive way."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def reduce_scatter_ring(chunks: Sequence[torch.Tensor]) -> None:
    """Add up around the ring, in place: rank r ends with the whole sum of chunk r + 1."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        outgoing = chunks[(rank - step) % world_size]
        target = chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(target)
        sending = dist.isend(outgoing, right)
        dist.recv(incoming, left)
        sending.wait()
        target += incoming


def all_gather_ring(chunks: Sequence[torch.Tensor]) -> None:
    """Hand out around the ring, in place: rank r has chunk r + 1 at first, all at last."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        sending = dist.isend(chunks[(rank + 1 - step) % world_size], right)
        dist.recv(chunks[(rank - step) % world_size], left)
        sending.wait()


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Sum `tensor` (flat, in place) over all ranks, by way of neighbours only.

    Patarasuk and Yuan, 2009, https://doi.org/10.1016/j.jpdc.2008.09.002.
    """
    chunks = tensor.tensor_split(dist.get_world_size())  # views, not copies
    reduce_scatter_ring(chunks)
    all_gather_ring(chunks)


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
