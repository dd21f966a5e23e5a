"""All-reduce out of send and receive: as a ring and the naive way."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def reduce_scatter_ring(
    chunks: Sequence[torch.Tensor], group: ProcessGroup | None = None
) -> None:
    """Add up around the ring, in place: rank r ends with the whole sum of chunk r + 1.

    The ring is the ranks of `group`, which count within it; without one it is all ranks.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        outgoing = chunks[(rank - step) % world_size]
        target = chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(target)
        sending = dist.isend(outgoing, group=group, group_dst=right)
        dist.recv(incoming, group=group, group_src=left)
        sending.wait()
        target += incoming


def all_gather_ring(
    chunks: Sequence[torch.Tensor], group: ProcessGroup | None = None
) -> None:
    """Hand out around the ring, in place: rank r has chunk r + 1 at first, all at last."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        outgoing = chunks[(rank + 1 - step) % world_size]
        target = chunks[(rank - step) % world_size]
        sending = dist.isend(outgoing, group=group, group_dst=right)
        dist.recv(target, group=group, group_src=left)
        sending.wait()


def ring_all_reduce(tensor: torch.Tensor, group: ProcessGroup | None = None) -> None:
    """Sum `tensor` (in place) over the ranks of `group`, by way of neighbours only.

    Without a group these are all ranks. Shape and dtype must be the same on all ranks: a
    message is bytes, and the ranks don't ask each other what it holds. Patarasuk and Yuan,
    2009, https://doi.org/10.1016/j.jpdc.2008.09.002.
    """
    chunks = tensor.view(-1).tensor_split(dist.get_world_size(group))  # views, not copies
    reduce_scatter_ring(chunks, group)
    all_gather_ring(chunks, group)


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
