"""PyTorch's own ZeRO 3, `fully_shard`: the right way to apply it, and the wrong ones."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam

from mgpu_tutorial.lab import without_values
from mgpu_tutorial.sharding.training import (
    PREPARE,
    VOCABULARY,
    Prepared,
    loss_of,
    new_model,
    take_step,
)
from mgpu_tutorial.shared.models import SmallTransformer

Shard = Callable[..., None]


# Ways to apply it


def block_by_block(model: SmallTransformer, **settings: object) -> None:
    """The right way: each block is a unit, and the model one for what is left."""
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)


def only_the_root(model: SmallTransformer, **settings: object) -> None:
    """A mistake: one unit for everything, which is gathered at once."""
    fully_shard(model, **settings)


def forget_a_block(model: SmallTransformer, **settings: object) -> None:
    """A mistake: the last block is left to the root, and is there as long as the root is."""
    for block in model.blocks[:-1]:
        fully_shard(block, **settings)
    fully_shard(model, **settings)


WAYS = {
    "block by block": (block_by_block, {}),
    "keep until backward": (block_by_block, {"reshard_after_forward": False}),
    "only the root": (only_the_root, {}),
    "last block forgotten": (forget_a_block, {}),
}


# The stage of ZeRO that it is


def fsdp(module: SmallTransformer) -> Prepared:
    """ZeRO 3 by PyTorch: gradients are averaged inside backward."""
    block_by_block(module)
    return as_prepared(module)


def as_prepared(module: nn.Module) -> Prepared:
    """Prepare a module that is sharded already: its optimizer must be made afterwards."""
    optimizer = Adam(module.parameters(), lr=0.01)
    return Prepared(module, optimizer, lambda: whole_values(module))


ALL_STAGES = [*PREPARE.values(), fsdp]


def whole_values(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters by name, gathered on every rank."""
    return {
        name: p.full_tensor().detach() if isinstance(p, DTensor) else p.detach()
        for name, p in module.named_parameters()
    }


# Mistakes that nobody reports


def optimizer_too_early(rank: int, world_size: int) -> tuple[float, float]:
    """The optimizer before `fully_shard`: the loss before and after twenty steps."""
    model = new_model()
    optimizer = Adam(model.parameters(), lr=0.01)
    block_by_block(model)  # puts other parameters in the place of those
    losses = [step_on_one_batch(model, optimizer) for _ in range(20)]
    return losses[0], losses[-1]


def step_on_one_batch(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step, always on the same batch; returns the loss before it."""
    optimizer.zero_grad()
    loss = loss_of(model, 0, dist.get_rank(), dist.get_world_size())
    loss.backward()
    optimizer.step()
    return loss.item()


# Settings


def clip(rank: int, world_size: int, limit: float = 0.1) -> float:
    """Clip the gradients of all ranks together; the norm that they had, on every rank."""
    model = new_model()
    block_by_block(model)
    loss_of(model, 0, rank, world_size).backward()
    return clip_grad_norm_(model.parameters(), limit).full_tensor().item()


# Checkpoints


def save(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    """Five steps; then each rank writes its slices into `folder`."""
    prepared = fsdp(new_model())
    for step in range(5):
        take_step(prepared, step)
    model, optimizer = get_state_dict(prepared.model, prepared.optimizer)
    checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    return prepared.whole()


def load(rank: int, world_size: int, folder: str, steps: int = 0) -> dict[str, torch.Tensor]:
    """Each rank reads its slices of a model that was never whole here, and trains on."""
    with torch.device("meta"):  # shapes without memory
        model = SmallTransformer(VOCABULARY, width=32, heads=4, depth=2)
    block_by_block(model)
    model.to_empty(device="cpu")  # memory for this rank's slices, values still to come
    prepared = as_prepared(model)
    read(prepared, folder)
    for step in range(5, 5 + steps):
        take_step(prepared, step)
    return prepared.whole()


def read(prepared: Prepared, folder: str) -> None:
    """Fill a sharded model and its optimizer from a checkpoint of any number of ranks."""
    names = ("model", "optimizer")
    states = get_state_dict(prepared.model, prepared.optimizer)
    parts = dict(zip(names, states, strict=True))
    checkpoint.load(parts, checkpoint_id=folder)
    set_state_dict(
        prepared.model,
        prepared.optimizer,
        model_state_dict=parts["model"],
        optim_state_dict=parts["optimizer"],
    )


# A thousand ranks


def step_of_a_giant(rank: int, world_size: int, width: int, depth: int) -> dict[str, int]:
    """One step of a model without values: its parameters, and those that a rank keeps."""
    mesh = init_device_mesh("cpu", (world_size,))
    with torch.device("meta"):
        model = SmallTransformer(50_304, width, width // 128, depth)
    whole = sum(p.numel() for p in model.parameters())
    block_by_block(model, mesh=mesh)
    with without_values():
        model.to_empty(device="cpu")
        mine = sum(p.to_local().numel() for p in model.parameters())
        tokens = torch.zeros(1, 64, dtype=torch.long)
        model(tokens).sum().backward()
    return {"parameters": whole, "on a rank": mine}
