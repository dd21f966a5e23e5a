"""What a function that takes `group=None` asks of it: None is all ranks."""

import torch.distributed as dist


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
