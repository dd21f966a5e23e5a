"""A checkpoint of what is sharded: a file of each rank, for as many ranks again."""

from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from mgpu_tutorial.shared.checkpoint import save_whole
from mgpu_tutorial.shared.groups import size_of
from mgpu_tutorial.shared.guards import agree


def save_shards(
    folder: str,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    group: dist.ProcessGroup | None = None,
    **also: Any,
) -> None:
    """Each rank writes what it holds into a file of its own; all wait for the last one.

    At any stage of ZeRO, give the optimizer of this rank. `also` is the same on all ranks,
    such as the number of steps. A rank that dies leaves its old file: see `load_shards`.
    `group` are the ranks that share the model, all by default; where several groups save,
    each has a folder of its own.
    """
    optimizer = getattr(optimizer, "inner", optimizer)  # of a ShardedOptimizer
    save = [uuid4().hex]
    dist.broadcast_object_list(save, group_src=0, group=group)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "also": also}
    save_whole(_file(folder, group), state | {"save": save[0]})
    dist.barrier(group)


def load_shards(
    folder: str,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Each rank reads its own file; returns what was saved `also`.

    Model and optimizer are sharded as they were, over as many ranks. Raises a ValueError on
    every rank, before anything is loaded, where the files are not of one save: a rank had
    died. `group` are the ranks that have saved together.
    """
    optimizer = getattr(optimizer, "inner", optimizer)  # of a ShardedOptimizer
    state = torch.load(_file(folder, group), map_location="cpu", weights_only=True)
    agree(group, save=state["save"], also=state["also"])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["also"]


def _file(folder: str, group: dist.ProcessGroup | None) -> str:
    return f"{folder}/rank-{dist.get_rank(group)}-of-{size_of(group)}.pt"
