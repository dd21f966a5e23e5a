"""The end of a step with a scaled loss on several ranks, right and wrong."""

from collections.abc import Callable

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import nll_loss
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.optim import Optimizer

from mgpu_tutorial.data_partitioning import global_batches
from mgpu_tutorial.distributed_sgd.sgd import average_gradients, new_model
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.guards import divides


def finish_step(model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> None:
    """Average the scaled gradients over all ranks, unscale and clip them, then step or skip.

    The model has no wrapper, its parameters are in float32, and all ranks have one scale.
    Not general: `prove` it on your model.
    """
    average_gradients(model)
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def look_then_average(model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> None:
    """Wrong: each rank decides from its own gradients, then all average them."""
    scaler.unscale_(optimizer)
    average_gradients(model)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def train_scaled(
    rank: int,
    world_size: int,
    end_of_step: Callable,
    infinite: tuple[int, int] | None = None,
    dtype: torch.dtype = torch.float32,
    init_scale: float = 1024.0,
) -> list[tuple[bool, float, torch.Tensor]]:
    """All ranks take four steps on scaled losses, each of which `end_of_step` ends.

    `infinite` = (rank, step) plants an infinity. Returns for each step whether this rank's
    gradients were finite, the scale after the step, and the parameters.
    """
    divides("images", 24, world_size)
    data, (model, optimizer), records = digits(), new_model(), []
    device = data.images.device.type
    scaler = GradScaler(device, init_scale=init_scale)
    batches = global_batches(rank, world_size, len(data), 24, seed=1, epoch=0)
    for step, mine in enumerate(batches[:4]):
        optimizer.zero_grad()
        with torch.autocast(device, dtype, enabled=dtype.itemsize == 2):
            loss = nll_loss(model(data.images[mine]), data.labels[mine])
        scaler.scale(loss).backward()
        if infinite == (rank, step):
            model.fc2.bias.grad[0] = float("inf")
        finite = all(p.grad.isfinite().all() for p in model.parameters())
        end_of_step(model, optimizer, scaler)
        weights = parameters_to_vector(model.parameters()).detach()
        records.append((bool(finite), scaler.get_scale(), weights))
    return records
