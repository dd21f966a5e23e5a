"""What a function that takes `group=None` asks of it: None is all ranks."""

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn


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
