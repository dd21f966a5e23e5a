"""Which tokens of a sequence a rank gets: their positions, for three ways to deal."""

import torch
from torch import Tensor


def contiguous(length: int, rank: int, world_size: int) -> Tensor:
    """A run of neighbours for each rank."""
    require_chunks(length, world_size)
    return torch.arange(length).chunk(world_size)[rank]


def zigzag(length: int, rank: int, world_size: int) -> Tensor:
    """One chunk from the front, and the one that is as far from the end."""
    require_chunks(length, 2 * world_size)
    chunks = torch.arange(length).chunk(2 * world_size)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def striped(length: int, rank: int, world_size: int) -> Tensor:
    """Every N-th token."""
    require_chunks(length, world_size)
    return torch.arange(rank, length, world_size)


def require_chunks(length: int, chunks: int) -> None:
    """ValueError, on every rank and before anything is sent, unless chunks are equal."""
    if length < 1 or length % chunks:
        more = max(1, -(-length // chunks)) * chunks
        raise ValueError(
            f"a sequence of {length} tokens does not divide into {chunks} equal chunks: "
            f"pad it to {more} tokens, and leave the padding out of the loss"
        )
