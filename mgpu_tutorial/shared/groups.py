"""What a function that takes `group=None` asks of it: None is all ranks."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from itertools import zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def size_of(group: dist.ProcessGroup | None) -> int:
    """The number of ranks in a group. Raises a ValueError in a rank that isn't one of them.

    Without this, torch's calls would return at once there, and nothing would be averaged.
    Raises a TypeError for what is no group, such as a list of ranks.
    """
    outside = dist.GroupMember.NON_GROUP_MEMBER  # what `new_group` gives to the other ranks
    if not (group is None or isinstance(group, dist.ProcessGroup) or group == outside):
        raise TypeError(
            f"{group!r} is no process group: make one by torch.distributed.new_group, on all "
            "ranks, or give None for all ranks"
        )
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} isn't in the group that it was given: give each rank a "
            "group with itself in it, or None for all ranks"
        )
    return dist.get_world_size(group)


def require_same(what: str, values: Sequence, group: dist.ProcessGroup | None) -> None:
    """Raise a ValueError on every rank of the group unless all have the same values.

    All ranks gather them. A group of the backend "fake" has no other ranks to ask.
    """
    everywhere = [values] * size_of(group)
    if dist.get_backend(group) != "fake":
        dist.all_gather_object(everywhere, values, group=group)
    for rank, others in enumerate(everywhere):
        for own, other in zip_longest(everywhere[0], others):
            if other != own:
                raise ValueError(
                    f"{what} must be the same on all ranks, and rank {rank} of the group has "
                    f"{other}, where rank 0 has {own}"
                )


def order_of(tensor: Tensor) -> tuple:
    """Its shape, and where its numbers do not lie row by row, their strides.

    A message has the numbers of a dense tensor as they lie in memory, so the same shape with
    other strides, as of channels_last, is another order.
    """
    shape = tuple(tensor.shape)
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return shape
    strides = zip(shape, tensor.stride(), strict=True)
    return shape, "strides", [stride for size, stride in strides if size > 1]


def require_dense(named: Iterable[tuple[str, Tensor]]) -> None:
    """ValueError for a tensor with gaps in memory, or with numbers that share a place.

    A message has bytes as they lie, so it would bring what stands in the gaps.
    """
    for name, tensor in named:
        places = 1
        pairs = zip(tensor.stride(), tensor.shape, strict=True)
        for stride, size in sorted(pair for pair in pairs if pair[1] > 1):
            if stride != places and tensor.numel():
                raise ValueError(
                    f"`{name}` is a view with gaps or repetitions in memory, strides "
                    f"{tensor.stride()} for shape {tuple(tensor.shape)}, and a message would "
                    "bring its bytes as they lie: make it of a .clone() of its own"
                )
            places *= size


def require_whole(
    named: Iterable[tuple[str, nn.Parameter]], group: dist.ProcessGroup | None
) -> None:
    """ValueError where a parameter is a part that other ranks of this group have not.

    That are a tensor-parallel layer's, a shard, a DTensor and a rank's own experts. A part
    that is shared out over another group, such as "tp" beside "dp", is whole for this one.
    """
    if size_of(group) == 1 or dist.get_backend(group) == "fake":
        return  # a pretended rank has no others
    here = set(dist.get_process_group_ranks(group or dist.group.WORLD))
    for name, parameter in named:
        if any(hasattr(parameter, mark) for mark in ("cut", "own", "placements")):
            over = getattr(parameter, "group", None) or dist.group.WORLD
            if len(here.intersection(dist.get_process_group_ranks(over))) > 1:
                raise ValueError(
                    f"`{name}` is this rank's part of a layer, and others of the group have "
                    "other parts, which would be averaged or replaced: give the group of the "
                    "ranks that have the same part"
                )


def copy_in_group(module: M, memo: dict) -> M:
    """A deep copy of a module that has a `group`: the copy has the same one, uncopied."""
    memo[id(module.group)] = module.group
    memo[id(module)] = other = type(module).__new__(type(module))
    other.__setstate__(deepcopy(vars(module), memo))
    return other
