"""All-reduce out of send and receive: as a ring and the naive way."""

from collections.abc import Sequence
from itertools import pairwise

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
    check_chunks(chunks, world_size)
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
    check_chunks(chunks, world_size)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        outgoing = chunks[(rank + 1 - step) % world_size]
        target = chunks[(rank - step) % world_size]
        sending = dist.isend(outgoing, group=group, group_dst=right)
        dist.recv(target, group=group, group_src=left)
        sending.wait()


def ring_all_reduce(tensor: torch.Tensor, group: ProcessGroup | None = None) -> None:
    """Sum `tensor` (in place) over the ranks of `group`, by way of neighbours only.

    Without a group these are all ranks. Raises ValueError on a rank that is not in the group,
    and for a tensor that cannot be summed in place. Shape and dtype must be the same on all
    ranks: a message is bytes, and the ranks don't ask each other what it holds. Patarasuk and
    Yuan, 2009, https://doi.org/10.1016/j.jpdc.2008.09.002.
    """
    check_in_place(tensor)
    if dist.get_rank(group) < 0:
        raise ValueError("this rank is not in the group: only the group's own ranks call it")
    chunks = tensor.view(-1).tensor_split(dist.get_world_size(group))  # views, not copies
    reduce_scatter_ring(chunks, group)
    all_gather_ring(chunks, group)


def check_chunks(chunks: Sequence[torch.Tensor], world_size: int) -> None:
    """Raise ValueError for chunks that a ring cannot sum in place."""
    if len(chunks) != world_size:
        raise ValueError(
            f"a ring needs a chunk for each rank: world size {world_size}, got {len(chunks)} "
            "chunks. Cut the tensor by tensor_split(world_size)"
        )
    check_in_place(*chunks)
    places = sorted((c.data_ptr(), c.data_ptr() + c.nbytes) for c in chunks if c.nbytes)
    if any(begin < end for (_, end), (begin, _) in pairwise(places)):
        raise ValueError(
            "chunks that share memory, of which each sum would change another one: "
            "cut one tensor by tensor_split(world_size), or clone them"
        )


def check_in_place(*tensors: torch.Tensor) -> None:
    """Raise ValueError for tensors that no message can be received into and added to."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError(
            "a tensor that is not contiguous can neither be sent nor received into: "
            "sum tensor.contiguous(), and copy it back"
        )
    if any(tensor.is_neg() or tensor.is_conj() for tensor in tensors):
        raise ValueError(
            "a view that is negated or conjugated when it is read, of which the bytes would "
            "travel as they lie: sum tensor.resolve_neg().resolve_conj(), and copy it back"
        )
    if any(tensor.dtype == torch.bool for tensor in tensors):
        raise ValueError(
            "True + True is True, so a sum of torch.bool counts nothing: sum tensor.int()"
        )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            "a sum in place would change a tensor that autograd records: "
            "sum its .grad, or use torch.no_grad()"
        )


def naive_all_reduce(tensor: torch.Tensor) -> None:
    """Sum `tensor` (in place) on rank 0 and send the sum to everybody."""
    check_in_place(tensor)
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
