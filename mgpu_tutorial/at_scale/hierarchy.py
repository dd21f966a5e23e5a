"""An all-reduce that knows which ranks share a node, out of send and receive."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

Method = Callable[[torch.Tensor, int], None]


def pass_on(outgoing: torch.Tensor, incoming: torch.Tensor, ranks: Sequence[int]) -> None:
    """Send to the right neighbour among `ranks`, and receive from the left one."""
    here, size = ranks.index(dist.get_rank()), len(ranks)
    sending = dist.isend(outgoing, ranks[(here + 1) % size])
    dist.recv(incoming, ranks[(here - 1) % size])
    sending.wait()


def reduce_scatter_among(chunks: Sequence[torch.Tensor], ranks: Sequence[int]) -> None:
    """The rank at place i ends with the sum of chunk i + 1; all of `ranks` call this."""
    here, size = ranks.index(dist.get_rank()), len(ranks)
    for step in range(size - 1):
        target = chunks[(here - step - 1) % size]
        incoming = torch.empty_like(target)
        pass_on(chunks[(here - step) % size], incoming, ranks)
        target += incoming


def all_gather_among(chunks: Sequence[torch.Tensor], ranks: Sequence[int]) -> None:
    """The rank at place i begins with chunk i + 1; all end with the same bits of each."""
    here, size = ranks.index(dist.get_rank()), len(ranks)
    for step in range(size - 1):
        pass_on(chunks[(here + 1 - step) % size], chunks[(here - step) % size], ranks)


def flat_ring(tensor: torch.Tensor, per_node: int) -> None:
    """The ring of all ranks, which does not care where they are; sums `tensor` in place."""
    ranks = range(dist.get_world_size())
    chunks = tensor.tensor_split(len(ranks))  # views, not copies
    reduce_scatter_among(chunks, ranks)
    all_gather_among(chunks, ranks)


def hierarchical(tensor: torch.Tensor, per_node: int) -> None:
    """Add up inside the node, then each part across the nodes, and hand out inside.

    Ranks 0 to per_node - 1 are a node, the next ones another. Across the nodes each rank
    meets those of its own place, so every GPU uses its own network card.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    start = rank // per_node * per_node
    node = range(start, start + per_node)
    peers = range(rank % per_node, world_size, per_node)
    chunks = tensor.tensor_split(per_node)
    # in the node: this rank gets the node's sum of one chunk
    reduce_scatter_among(chunks, node)
    mine = chunks[(rank - start + 1) % per_node]
    # across the nodes: the sum of all nodes, of this chunk only
    parts = mine.tensor_split(len(peers))
    reduce_scatter_among(parts, peers)
    all_gather_among(parts, peers)
    # in the node: everybody gets all chunks
    all_gather_among(chunks, node)


def sum_by(rank: int, world_size: int, method: Method, per_node: int, count: int) -> float:
    """All-reduce `count` numbers that depend on the rank; returns the largest error here."""
    tensor = torch.arange(count, dtype=torch.float64) + rank
    method(tensor, per_node)
    every = torch.arange(count, dtype=torch.float64) * world_size
    return (tensor - every - sum(range(world_size))).abs().max().item()
