"""New topic: every rank gives a number, and all of them get the mean.

Say here in a line or two who communicates what with whom in this chapter.
"""

import torch
import torch.distributed as dist


def mean(rank: int, world_size: int) -> float:
    """Every rank gives its number to all; each returns the mean of all of them."""
    number = torch.tensor([float(rank)])
    dist.all_reduce(number)
    return number.item() / world_size


def one_stays_away(rank: int, world_size: int) -> None:
    """Rank 0 does not take part in the sum that all others wait for: a mistake."""
    if rank > 0:
        dist.all_reduce(torch.ones(1))
