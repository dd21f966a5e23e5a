"""One whole file out of any plan, and into any other."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mgpu_tutorial.language_model.model import BLOCKS
from mgpu_tutorial.shared.checkpoint import save_whole
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


def save(
    path: str, model: nn.Module, adam: torch.optim.Optimizer, mesh: DeviceMesh, step: int
) -> None:
    """Rank 0 writes parameters and moments of the whole model; all ranks call it."""
    mine = {}
    for name, p in zip(names_of(model, mesh), model.parameters(), strict=True):
        if p in adam.state:  # with ZeRO 1 on its owner only
            parts = p, *(adam.state[p][moment] for moment in MOMENTS)
            mine[name] = [whole_of(part, p).cpu() for part in parts]
    every = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, every)
    if every:
        tensors = {name: parts for held in every for name, parts in held.items()}
        updates = int(next(iter(adam.state.values()))["step"])
        save_whole(path, {"step": step, "updates": updates, "tensors": tensors})
    dist.barrier()


def load(path: str, model: nn.Module) -> dict:
    """Give a whole model the parameters of a file that `save` wrote; returns all of it.

    ValueError where the file is of another model.
    """
    state = torch.load(path, weights_only=True)
    try:
        model.load_state_dict({name: parts[0] for name, parts in state["tensors"].items()})
    except RuntimeError as error:
        why = str(error).splitlines()[-1].strip()
        raise ValueError(f"{path} is of another model: {why}") from None
    return state


def put_moments(
    model: nn.Module, adam: torch.optim.Optimizer, mesh: DeviceMesh, state: dict
) -> None:
    """Give Adam the moments of its parameters, where the checkpoint has them."""
    mine = {id(p) for p in adam.param_groups[0]["params"]}
    for name, p in zip(names_of(model, mesh), model.parameters(), strict=True):
        moments = [moment.to(p) for moment in state["tensors"].get(name, [])[1:]]
        if moments and id(p) in mine:
            if isinstance(p, Shard):
                moments = [shard(moment, p.cut, p.group).detach() for moment in moments]
            count = torch.tensor(float(state["updates"]))
            adam.state[p] = {"step": count, **dict(zip(MOMENTS, moments, strict=True))}
