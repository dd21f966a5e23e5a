"""Does a function do in a group of its ranks what it does in a world of its own?"""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mgpu_tutorial.lab.teach.build import expect, launch


def in_two_groups(
    rank: int, world_size: int, function: Callable, use: Callable, **options: Any
) -> Any:
    """What `use(rank, function)` gives, when `function` gets the group of this rank.

    The even ranks are one group, the odd ranks another.
    """
    groups = [dist.new_group(list(range(first, world_size, 2))) for first in (0, 1)]
    try:
        return use(rank, functools.partial(function, group=groups[rank % 2], **options))
    except TypeError as error:
        if "'group'" not in str(error):
            raise
        raise TypeError("it takes no argument `group`, which is None for all ranks") from None


def expect_in_groups(
    function: Callable, use: Callable, what: str, even: Any, odd: Any, within: float = 0.0
) -> None:
    """Raise AssertionError unless ranks 0 and 2 find `even`, and ranks 1 and 3 `odd`."""
    for rank, found in enumerate(launch(in_two_groups, 4, function, use).results):
        where = f"groups {{0, 2}} and {{1, 3}}, rank {rank}: {what}"
        expect(found, odd if rank % 2 else even, where, within)
