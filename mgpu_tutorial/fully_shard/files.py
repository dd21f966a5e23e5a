"""Weights from an ordinary file, and checkpoints that any number of ranks can read."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Adam

from mgpu_tutorial.fully_shard.units import shard_blocks
from mgpu_tutorial.shared.checkpoint import save_whole


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

    Raises ValueError, before anything is copied, where the file does not fit the model.
    """
    whole = torch.load(path, mmap=True, map_location="cpu")
    require_fitting(whole, model, path)
    for name, p in model.named_parameters():
        mesh, placements = p.device_mesh, p.placements
        p.copy_(distribute_tensor(whole[name], mesh, placements, src_data_rank=None))
    for name, buffer in model.named_buffers():
        if name in whole:
            buffer.copy_(whole[name])


def require_fitting(whole: dict, model: nn.Module, path: str) -> None:
    """ValueError where names, shapes, dtypes or ties are not a ready model's."""
    for name, p in model.named_parameters():
        if not isinstance(p, DTensor) or p.is_meta:
            raise ValueError(f"`{name}` is not sharded, or without memory: use `empty_model`")
    expected = model.state_dict()
    for name in (*expected, *whole):
        if name not in whole:
            held = ", ".join([str(key) for key in whole][:3])
            raise ValueError(f"{path} has no `{name}`: it holds {held}, …")
        if name not in expected:
            raise ValueError(f"the model has no `{name}`, which {path} holds")
        there, here = tuple(whole[name].shape), tuple(expected[name].shape)
        if there != here:
            raise ValueError(f"`{name}` is {there} in {path}, and {here} in the model")
        if whole[name].dtype != expected[name].dtype:
            raise ValueError(
                f"`{name}` is {whole[name].dtype} in {path}, and {expected[name].dtype} in "
                "the model. Nothing was changed: convert one to the other's dtype first"
            )
    first: dict[nn.Parameter, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        tied = first.setdefault(p, name)
        one, other = whole[tied], whole[name]
        if one.data_ptr() != other.data_ptr() and not torch.equal(one, other):
            raise ValueError(
                f"`{tied}` and `{name}` are one tensor in the model, and {path} has two that "
                "differ. Nothing was changed: make the model without the tie"
            )


def require_own(model: nn.Module, optimizer: Adam) -> None:
    """ValueError where an optimizer steps other parameters than the model has."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if not held.issubset(model.parameters()):
        raise ValueError(
            "the optimizer steps tensors that are not in the model: make it after "
            "fully_shard, which puts others in the place of the old ones"
        )


def write_whole(model: nn.Module, optimizer: Adam, path: str) -> None:
    """All ranks gather weights and moments, and rank 0 writes them into one ordinary file."""
    require_own(model, optimizer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:  # the others have got nothing
        save_whole(path, {"model": weights, "optimizer": state})


def save(model: nn.Module, optimizer: Adam, folder: str) -> None:
    """Each rank writes its shards of the weights and moments."""
    require_own(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def require_all_of(folder: str, weights: dict) -> None:
    """ValueError where a checkpoint holds a weight that the model has not."""
    held = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    saved = {name.removeprefix("model.") for name in held if name.startswith("model.")}
    if more := sorted(saved - weights.keys()):
        raise ValueError(f"the model has no `{more[0]}`, which {folder} holds")


def resume(model: nn.Module, optimizer: Adam, folder: str) -> None:
    """Each rank reads its shards, however many ranks have written them."""
    require_own(model, optimizer)
    if not Path(folder, ".metadata").exists():
        raise ValueError(f"{folder} holds no checkpoint that `save` has finished")
    weights, state = get_state_dict(model, optimizer)
    require_all_of(folder, weights)
    checkpoint.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
