"""Weights from an ordinary file, and checkpoints that any number of ranks can read."""

from collections.abc import Callable

import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import distribute_tensor
from torch.optim import Adam

from mgpu_tutorial.fully_shard.units import shard_blocks


@torch.no_grad()
def empty_model(make: Callable) -> nn.Module:
    """A sharded model that was never whole: memory for this rank's shards, no values yet."""
    with torch.device("meta"):  # shapes without memory
        model = make()
    shard_blocks(model)
    model.to_empty(device=torch.get_default_device())
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))  # what nobody fills afterwards is seen
    return model


@torch.no_grad()
def read_weights(model: nn.Module, path: str) -> None:
    """Each rank copies its rows, and the saved buffers, out of a file that it maps.

    Raises ValueError where the file has other names or shapes than the model.
    """
    whole = torch.load(path, mmap=True, map_location="cpu")
    there, here = ({n: t.shape for n, t in d.items()} for d in (whole, model.state_dict()))
    for name in [*here, *there]:
        one, other = there.get(name), here.get(name)
        if one != other:
            raise ValueError(f"`{name}` is {one} in {path}, and {other} in the model")
    for name, p in model.named_parameters():
        mesh, placements = p.device_mesh, p.placements
        p.copy_(distribute_tensor(whole[name], mesh, placements, src_data_rank=None))
    for name, buffer in model.named_buffers():
        if name in whole:
            buffer.copy_(whole[name])


def require_own(model: nn.Module, optimizer: Adam) -> None:
    """ValueError where an optimizer steps other parameters than the model has."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if not held.issubset(model.parameters()):
        raise ValueError("the optimizer holds other tensors: make it after fully_shard")


def save(model: nn.Module, optimizer: Adam, folder: str) -> None:
    """Each rank writes its shards of the weights and moments."""
    require_own(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def resume(model: nn.Module, optimizer: Adam, folder: str) -> None:
    """Each rank reads its shards, however many ranks have written them."""
    require_own(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    checkpoint.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
