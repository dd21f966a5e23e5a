"""Which random numbers must be the same on all ranks, and which must not."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from mgpu_tutorial.tensor_parallel.operators import Group


@contextmanager
def own_draws(group: Group = None) -> Iterator[None]:
    """Inside, every rank draws random numbers of its own; afterwards all draw the same.

    All ranks must have the same seed before, and enter.
    """
    seed = int(torch.randint(2**31, ()))  # a common draw, so a new one for each entry
    with torch.random.fork_rng():
        torch.manual_seed(seed + dist.get_rank(group))
        yield


def keep_half(rank: int, world_size: int) -> dict[str, list[int]]:
    """Dropout's masks of eight features: of a copy, of a piece, and of the next copy."""
    torch.manual_seed(0)
    masks = {"copy": torch.rand(8) < 0.5}
    with own_draws():
        masks["piece"] = torch.rand(8) < 0.5
    masks["next copy"] = torch.rand(8) < 0.5
    return {name: mask.int().tolist() for name, mask in masks.items()}
