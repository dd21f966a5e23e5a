"""Autocast, the life of a loss scaler, and where several ranks average their gradients.

The forward pass runs in bfloat16 or float16 under `torch.autocast`, the parameters stay in
float32, and a `GradScaler` keeps small gradients from vanishing
(https://docs.pytorch.org/docs/2.13/amp.html). With several ranks it matters where the
gradients are averaged: all ranks must see the same infinity, or they take different steps.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import nll_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from mgpu_tutorial.data_partitioning import global_batches
from mgpu_tutorial.distributed_sgd.sgd import average_gradients, flat_parameters, new_model
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.parameters import fingerprint

# One rank: a scaler step by step


class ScalerStep(NamedTuple):
    """One step of a scaler: the scale of its loss, and was the step taken or skipped?"""

    scale: float
    taken: bool


def train_in_float16(
    steps: range, saved: dict | None = None, **settings: float
) -> tuple[list[ScalerStep], dict]:
    """Train on one rank under float16 autocast, from a checkpoint `saved` on if given.

    `settings` are those of GradScaler. Returns each step, and a checkpoint.
    """
    data, (model, optimizer) = digits(), new_model()
    scaler = GradScaler("cpu", **settings)
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    for name, state in (saved or {}).items():
        parts[name].load_state_dict(state)
    log = []
    for step in steps:
        mine = slice(100 * step, 100 * step + 100)
        with torch.autocast("cpu", torch.float16):
            loss = nll_loss(model(data.images[mine]), data.labels[mine])
        optimizer.zero_grad()
        scale, before = scaler.get_scale(), flat_parameters(model)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        taken = not torch.equal(before, flat_parameters(model))
        log.append(ScalerStep(scale, taken))
    return log, {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}


# Several ranks: where the average goes

FinishStep = Callable[[nn.Module, Optimizer, GradScaler], None]
CLIP = 1.0  # the norm that gradients are clipped to


def average_then_look(model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> None:
    """All ranks average the scaled gradients; then each unscales, clips, and steps alike."""
    average_gradients(model)
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), CLIP)
    scaler.step(optimizer)
    scaler.update()


def look_then_average(model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> None:
    """Wrong: each rank decides from its own gradients, then all average them."""
    scaler.unscale_(optimizer)
    average_gradients(model)
    clip_grad_norm_(model.parameters(), CLIP)
    scaler.step(optimizer)
    scaler.update()


def clip_then_unscale(model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> None:
    """Wrong: all ranks average, then clip gradients that are still too long by the scale."""
    average_gradients(model)
    clip_grad_norm_(model.parameters(), CLIP)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def leave_out(model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> None:
    """Wrong: a rank with an infinity leaves the average out and halves its scale."""
    if all(p.grad.isfinite().all() for p in model.parameters()):
        average_then_look(model, optimizer, scaler)
    else:
        scaler.update(scaler.get_scale() / 2)


class StepRecord(NamedTuple):
    """One rank in a step: were the gradients of its backward finite? And after the step:
    its loss scale, the fingerprint of its weights, are these finite?"""

    finite_gradients: bool
    scale: float
    weights: str
    finite_weights: bool


def train_scaled(
    rank: int,
    world_size: int,
    finish_step: FinishStep = average_then_look,
    ddp: bool = False,
    infinite: tuple[int, int] | None = None,
    dtype: torch.dtype = torch.float32,
    **settings: float,
) -> tuple[list[StepRecord], torch.Tensor]:
    """All ranks take four steps on scaled losses, each of which `finish_step` ends.

    `infinite` = (rank, step) plants an infinity, `settings` are those of GradScaler.
    Returns a record per step, and the parameters.
    """
    data, (model, optimizer) = digits(), new_model()
    if ddp:
        model = DistributedDataParallel(model)
    device = data.images.device.type
    scaler = GradScaler(device, **{"init_scale": 1024.0} | settings)
    records = []
    for step, mine in enumerate(four_batches(rank, world_size, len(data))):
        optimizer.zero_grad()
        with torch.autocast(device, dtype, enabled=dtype.itemsize == 2):
            loss = nll_loss(model(data.images[mine]), data.labels[mine])
        scaler.scale(loss).backward()
        if infinite == (rank, step):
            model.fc2.bias.grad[0] = float("inf")
        before = all(p.grad.isfinite().all() for p in model.parameters())
        finish_step(model, optimizer, scaler)
        after = all(p.isfinite().all() for p in model.parameters())
        records.append(StepRecord(before, scaler.get_scale(), fingerprint(model), after))
    return records, flat_parameters(model)


def four_batches(rank: int, world_size: int, samples: int) -> list[list[int]]:
    """This rank's share of the first four global batches of 120."""
    return global_batches(rank, world_size, samples, 120, seed=1, epoch=0)[:4]
