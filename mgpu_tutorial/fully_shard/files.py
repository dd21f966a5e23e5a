"""Weights from an ordinary file, and checkpoints that any number of ranks can read."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import distribute_tensor
from torch.optim import Adam

from mgpu_tutorial.fully_shard.units import shard_blocks


def empty_model(make: Callable) -> nn.Module:
    """A sharded model that was never whole: memory for this rank's shards, no values yet."""
    with torch.device("meta"):  # shapes without memory
        model = make()
    shard_blocks(model)
    return model.to_empty(device=torch.get_default_device())


@torch.no_grad()
def read_weights(model: nn.Module, path: str) -> None:
    """Each rank copies its rows out of a file that it maps into memory."""
    whole = torch.load(path, mmap=True)
    for name, p in model.named_parameters():
        mesh, placements = p.device_mesh, p.placements
        p.copy_(distribute_tensor(whole[name], mesh, placements, src_data_rank=None))


def write_whole(model: nn.Module, optimizer: Adam, path: str) -> None:
    """All ranks gather weights and moments, and rank 0 writes them into one ordinary file."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:  # the others have got nothing
        torch.save({"model": weights, "optimizer": state}, path)


def save(model: nn.Module, optimizer: Adam, folder: str) -> None:
    """Each rank writes its shards of the weights and moments."""
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def resume(model: nn.Module, optimizer: Adam, folder: str) -> None:
    """Each rank reads its shards, however many ranks have written them."""
    weights, state = get_state_dict(model, optimizer)
    checkpoint.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
