"""Replicated parameters must be bit-identical on all ranks, and so must dropout on them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.shared.parameters import fingerprint
from mgpu_tutorial.tensor_parallel.layers import Piece
from mgpu_tutorial.tensor_parallel.operators import Group


def replicated(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that every rank has whole, by name."""
    return {n: p for n, p in model.named_parameters() if not isinstance(p, Piece)}


def fingerprints(model: nn.Module) -> dict[str, str]:
    """The bits of each replicated parameter, as eight digits by name."""
    return {n: fingerprint(nn.ParameterList([p])) for n, p in replicated(model).items()}


def copies_that_differ(model: nn.Module, group: Group = None) -> list[str]:
    """The replicated parameters whose bits differ between ranks; all ranks call it."""
    mine = fingerprints(model)
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return [name for name in mine if len({other[name] for other in everyone}) > 1]


@contextmanager
def own_draws(group: Group = None) -> Iterator[None]:
    """Inside, every rank draws random numbers of its own; afterwards all draw the same.

    All ranks must have the same seed before, and enter.
    """
    seed = int(torch.randint(2**31, ()))  # a common draw, so a new one for each entry
    with torch.random.fork_rng():
        torch.manual_seed(seed + dist.get_rank(group))
        yield
