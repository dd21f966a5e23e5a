"""What every rank has whole must have the same bits on all of them."""

import torch.distributed as dist
from torch import nn

from mgpu_tutorial.shared.parameters import fingerprint
from mgpu_tutorial.tensor_parallel.layers import Piece
from mgpu_tutorial.tensor_parallel.operators import Group


def replicated(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that every rank has whole, by name."""
    return {n: p for n, p in model.named_parameters() if not isinstance(p, Piece)}


def copies_that_differ(model: nn.Module, group: Group = None) -> list[str]:
    """The names of those whose bits are not the same on all ranks; all ranks call it."""
    mine = {n: fingerprint(nn.ParameterList([p])) for n, p in replicated(model).items()}
    everyone = all_of(mine, group)
    return [name for name in mine if len({other[name] for other in everyone}) > 1]


def all_of(thing: object, group: Group) -> list:
    """What each rank of the group has, on every rank of it."""
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, thing, group=group)
    return everyone
