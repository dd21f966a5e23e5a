"""One whole file out of any plan, and into any other."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mgpu_tutorial.language_model.model import BLOCKS, new_model
from mgpu_tutorial.language_model.steps import Adam
from mgpu_tutorial.tensor_parallel.block import whole_of
from mgpu_tutorial.tensor_parallel.layers import Shard, shard

SHIPPED = Path(__file__).with_name("pretrained.pt")
MOMENTS = "exp_avg", "exp_avg_sq"


def names_of(model: nn.Module, mesh: DeviceMesh) -> list[str]:
    """The names that this rank's parameters have in the whole model."""
    stage, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
    skipped = 1 + stage * BLOCKS // stages if stage else 0
    pairs = (name.split(".", 1) for name, _ in model.named_parameters())
    return [f"{int(layer) + skipped}.{rest}" for layer, rest in pairs]


def whole_state(model: nn.Module, adam: Adam, mesh: DeviceMesh, step: int) -> dict:
    """Parameters and moments of the whole model, on every rank: all ranks call it."""
    mine = {}
    for i, (name, p) in enumerate(
        zip(names_of(model, mesh), model.parameters(), strict=True)
    ):
        state = adam.adam.state.get(p, {})
        parts = [p.detach(), *(state.get(key, torch.zeros_like(p)) for key in MOMENTS)]
        if adam.owners:  # the owner has the moments
            for part in parts[1:]:
                dist.broadcast(part, adam.ranks[adam.owners[i]], group=adam.group)
        mine[name] = [whole_of(part, p).cpu() for part in parts]
    every: list = [None] * mesh["pp"].size()
    dist.all_gather_object(every, mine, group=mesh["pp"].get_group())
    updates = max(int(state["step"]) for state in adam.adam.state.values())
    tensors = {name: parts for stage in every for name, parts in stage.items()}
    return {"step": step, "updates": updates, "tensors": tensors}


def save(path: Path, state: dict) -> None:
    """Rank 0 writes the file beside its place and then renames it: it is whole or absent."""
    if dist.get_rank() == 0:
        draft = Path(path).with_suffix(".draft")
        torch.save(state, draft)
        os.replace(draft, path)
    dist.barrier()


def load(path: Path) -> dict:
    """A file that `save` wrote. ValueError where it is of another model."""
    state = torch.load(path, weights_only=True)
    shapes = {name: list(p.shape) for name, p in new_model().named_parameters()}
    found = {name: list(t[0].shape) for name, t in state.get("tensors", {}).items()}
    if found != shapes:
        other = next((name for name in shapes if found.get(name) != shapes[name]), "more")
        there = f"{other} of shape {found.get(other, 'none')}"
        raise ValueError(
            f"{path} is of another model: it has {there}, expected {shapes.get(other)}"
        )
    return state


def first_gradients(path: Path) -> dict[str, torch.Tensor]:
    """The gradients behind a checkpoint of the first step, by the names of the parameters.

    Adam's first moment is then a tenth of the gradient, since 1 - beta is 0.1.
    """
    return {name: tensors[1] / 0.1 for name, tensors in load(path)["tensors"].items()}


def put_parameters(model: nn.Sequential, state: dict) -> None:
    """Give a whole model the parameters of a checkpoint."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state["tensors"][name][0])


def put_moments(model: nn.Module, adam: Adam, mesh: DeviceMesh, state: dict) -> None:
    """Give Adam the moments of this rank's parts, where the checkpoint has them."""
    mine = {id(p) for group in adam.adam.param_groups for p in group["params"]}
    for name, p in zip(names_of(model, mesh), model.parameters(), strict=True):
        moments = [moment.to(p) for moment in state["tensors"][name][1:]]
        if moments and id(p) in mine:
            if isinstance(p, Shard):
                moments = [shard(moment, p.cut, p.group).detach() for moment in moments]
            count = torch.tensor(float(state["updates"]))
            adam.adam.state[p] = {"step": count, **dict(zip(MOMENTS, moments, strict=True))}
