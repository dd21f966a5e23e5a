"""Autocast, the life of a loss scaler, and the end of a step on several ranks."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.nn.functional import nll_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.optim import Optimizer

from mgpu_tutorial.data_partitioning import global_batches
from mgpu_tutorial.distributed_sgd.sgd import average_gradients, new_model
from mgpu_tutorial.shared.data import Digits, digits
from mgpu_tutorial.shared.guards import divides


def train_in_float16(
    model: nn.Module, optimizer: Optimizer, scaler: GradScaler, data: Digits, steps: range
) -> list[tuple[float, bool]]:
    """Train under float16 autocast; returns each step's scale, and whether it was taken."""
    if not all(0 <= 30 * step < len(data) for step in steps):
        raise ValueError(f"{len(data)} images are no {steps}: each step takes the next 30")
    log = []
    for step in steps:
        mine = slice(30 * step, 30 * step + 30)
        with torch.autocast("cpu", torch.float16):
            loss = nll_loss(model(data.images[mine]), data.labels[mine])
        optimizer.zero_grad()
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        log.append((scale, scaler.get_scale() >= scale))  # a skipped step halves it
    return log


def finish_step(model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> None:
    """All ranks average the scaled gradients; then each unscales, clips, and steps alike.

    All scales begin alike, and the optimizer has all of a model of replicas in float32. Not
    general: `prove` it on your model.
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


def leave_out(model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> None:
    """Wrong: a rank with an infinity leaves the average out and halves its scale."""
    if all(p.grad.isfinite().all() for p in model.parameters()):
        finish_step(model, optimizer, scaler)
    else:
        scaler.update(scaler.get_scale() / 2)


def train_scaled(
    rank: int,
    world_size: int,
    end_of_step: Callable,
    ddp: bool = False,
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
    if ddp:
        model = DistributedDataParallel(model)
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


def is_finite_everywhere(
    gradients: Iterable[torch.Tensor | None], group: ProcessGroup | None = None
) -> bool:
    """Are all gradients of all ranks finite? Every rank tells the others with one number.

    The ranks are those of `group`; without one they are all ranks. A parameter that is
    frozen or unused has None for a gradient, and None is finite.
    """
    gradients = [g for g in gradients if g is not None]
    overflow = any(not g.isfinite().all() for g in gradients)
    found = torch.tensor(float(overflow))
    dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return found.item() == 0


def cast_to_float8(rank: int, world_size: int, agree: bool) -> float:
    """The ranks gather a matrix of which each has 64 rows, a byte a number.

    The largest number, of all ranks or of rank 0, becomes 448. Returns the relative error.
    """
    torch.manual_seed(0)
    whole = torch.randn(world_size, 64, 64)
    whole[1] *= 10  # rank 1's rows are ten times larger
    largest = whole[rank].abs().max()
    if agree:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    else:
        dist.broadcast(largest, src=0)
    scale = 448 / largest
    short = (whole[rank] * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    gathered = torch.empty(world_size, 64, 64, dtype=torch.uint8)
    dist.all_gather_single(gathered.flatten(), short.view(torch.uint8).flatten())
    long = gathered.view(torch.float8_e4m3fn).float() / scale
    return ((long - whole).norm() / whole.norm()).item()
