"""A checkpoint of which each rank writes its own part, while the training goes on."""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def dealt(world_size: int, whole: torch.Tensor) -> torch.Tensor:
    """A tensor whose rows are dealt to the ranks: each keeps its own part."""
    mesh = init_device_mesh("cpu", (world_size,))
    return distribute_tensor(whole, mesh, [Shard(0)])


def save_while_training(rank: int, world_size: int, folder: str) -> float:
    """Begin to save ones, then take a step; which number is in the checkpoint?"""
    weight = dealt(world_size, torch.ones(2**20, 4))
    future = dcp.async_save({"weight": weight}, checkpoint_id=folder)
    weight.add_(1)  # the next step changes the weight, while it is being written
    future.result()  # wait, before this process ends or saves again
    found = dealt(world_size, torch.zeros(2**20, 4))
    dcp.load({"weight": found}, checkpoint_id=folder)
    return found.to_local().max().item()
