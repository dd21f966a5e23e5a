"""Autocast, the life of a loss scaler, and where several ranks average their gradients.

The forward pass runs in bfloat16 or float16 under `torch.autocast`, the parameters stay in
float32, and a `GradScaler` keeps small gradients from vanishing
(https://docs.pytorch.org/docs/2.13/amp.html). With several ranks it matters where the
gradients are averaged: all ranks must see the same infinity, or they take different steps.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import nll_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from mgpu_tutorial.data_partitioning import global_batches
from mgpu_tutorial.ddp_buckets.hooks import HOOKS
from mgpu_tutorial.distributed_sgd import average_gradients, flat_parameters, new_model
from mgpu_tutorial.lab import span
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.parameters import fingerprint

SUPPORTED = {"cpu": (torch.bfloat16, torch.float16), "cuda": (torch.bfloat16, torch.float16)}


def as_tf32(x: torch.Tensor) -> torch.Tensor:
    """What a TF32 unit reads of float32 numbers: 10 of the 23 bits behind the point.

    Rounds to the nearest, ties to even; finite numbers only.
    """
    bits = x.view(torch.int32)
    odd = (bits >> 13) & 1
    return ((bits + 0xFFF + odd) & ~0x1FFF).view(torch.float32)


def autocast(device: str, dtype: torch.dtype) -> AbstractContextManager:
    """`torch.autocast` that refuses what torch would only warn of; float32 switches it off.

    ValueError where `device` cannot autocast to `dtype`.
    """
    known = SUPPORTED.get(device, ())
    if dtype is torch.float32:
        return torch.autocast(device, enabled=False)
    if dtype not in known:
        can = ", ".join(map(str, known)) or "nothing"
        raise ValueError(
            f"autocast on {device} supports {can}, got {dtype}: torch would warn, compute "
            "in float32 and go on. Use one of these, or torch.float32 for no autocast."
        )
    return torch.autocast(device, dtype=dtype)


def new_scaler(model: nn.Module, **settings: float) -> GradScaler:
    """A GradScaler for the device where the parameters of `model` lie.

    A scaler of another device does not scale, or fails in `unscale_`. `settings` are those
    of torch.amp.GradScaler. ValueError for float16 parameters, which no scaler can help.
    """
    kinds = {p.device.type for p in model.parameters()}
    if len(kinds) != 1:
        raise ValueError(f"parameters lie on {sorted(kinds)}: a scaler serves one device")
    if any(p.dtype is torch.float16 for p in model.parameters()):
        raise ValueError(
            "the parameters are float16, and a scaler divides their gradients in float16 "
            "again: keep the model in float32 and run its forward under autocast"
        )
    return GradScaler(kinds.pop(), **settings)


def observe(module: nn.Module, *inputs: torch.Tensor) -> dict[str, str]:
    """The dtype that each layer of `module` returns for `inputs`, seen by a forward hook."""
    seen: dict[str, str] = {}

    def hook(name: str) -> Callable:
        def note(_: nn.Module, __: tuple, output: torch.Tensor) -> None:
            seen[name] = dtype_name(output.dtype)

        return note

    layers = [(n, m) for n, m in module.named_modules() if not list(m.children())]
    handles = [layer.register_forward_hook(hook(name)) for name, layer in layers]
    try:
        module(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


# One rank: a scaler step by step


class ScalerStep(NamedTuple):
    """One step of a scaler: what it met and what it did."""

    scale: float
    largest: float
    stepped: bool
    scale_after: float


def life_of_a_scaler(infinite_at: int, steps: int, **settings: float) -> list[ScalerStep]:
    """Take `steps` scaled steps, one of them with a planted infinity; say what happened."""
    data, (model, optimizer) = digits(), new_model()
    scaler = new_scaler(model, **settings)
    taken = []
    for step in range(steps):
        optimizer.zero_grad()
        mine = slice(100 * step, 100 * step + 100)
        loss = nll_loss(model(data.images[mine]), data.labels[mine])
        scale, before = scaler.get_scale(), flat_parameters(model)
        scaler.scale(loss).backward()
        if step == infinite_at:
            model.fc2.bias.grad[0] = float("inf")
        scaler.unscale_(optimizer)
        largest = max(p.grad.abs().max().item() for p in model.parameters())
        scaler.step(optimizer)
        scaler.update()
        stepped = not torch.equal(before, flat_parameters(model))
        taken.append(ScalerStep(scale, largest, stepped, scaler.get_scale()))
    return taken


# Several ranks: where the average goes

FinishStep = Callable[[nn.Module, Optimizer, GradScaler], None]


def average_then_look(
    model: nn.Module, optimizer: Optimizer, scaler: GradScaler, clip: float = 1.0
) -> None:
    """All ranks average the scaled gradients; then each unscales, clips, and steps alike."""
    average_gradients(model)
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()


def look_then_average(
    model: nn.Module, optimizer: Optimizer, scaler: GradScaler, clip: float = 1.0
) -> None:
    """Wrong: each rank decides from its own gradients, then all average them."""
    scaler.unscale_(optimizer)
    average_gradients(model)
    clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()


def leave_alone(
    model: nn.Module, optimizer: Optimizer, scaler: GradScaler, clip: float = 1.0
) -> None:
    """Wrong: a rank with an infinity leaves the average out."""
    if all(p.grad.isfinite().all() for p in model.parameters()):
        average_then_look(model, optimizer, scaler, clip)
    else:
        scaler.update(scaler.get_scale() / 2)


def check_agreement(model: nn.Module, scaler: GradScaler) -> None:
    """All ranks compare loss scales and parameters; RuntimeError on all where they differ."""
    mine = (scaler.get_scale(), fingerprint(model))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, (scale, text) in enumerate(everyone):
        first_scale, first_text = everyone[0]
        if scale != first_scale:
            raise RuntimeError(
                f"the loss scales differ: rank 0 has {first_scale:g}, rank {rank} has "
                f"{scale:g}. Average before unscale_, so that all see the same infinity."
            )
        if text != first_text:
            raise RuntimeError(f"the parameters of rank {rank} are not those of rank 0")


class StepRecord(NamedTuple):
    """One rank after a step: its loss scale, the fingerprint of its weights, all finite?"""

    scale: float
    weights: str
    finite: bool


def train_scaled(
    rank: int,
    world_size: int,
    finish_step: FinishStep = average_then_look,
    infinite: tuple[int, int] | None = None,
    steps: int = 4,
    verify: bool = False,
    **settings: float,
) -> tuple[list[StepRecord], torch.Tensor]:
    """Train on scaled losses; all ranks average their gradients in `finish_step`.

    `infinite` = (rank, step) plants an infinity before it; `verify` compares the ranks after
    each step; `settings` are those of GradScaler. Returns each step, and the parameters.
    """
    data, (model, optimizer) = digits(), new_model()
    scaler = new_scaler(model, **{"init_scale": 1024.0} | settings)
    records = []
    batches = global_batches(rank, world_size, len(data), 120, seed=1, epoch=0)
    for step, mine in enumerate(batches[:steps]):
        optimizer.zero_grad()
        loss = nll_loss(model(data.images[mine]), data.labels[mine])
        scaler.scale(loss).backward()
        if infinite == (rank, step):
            model.fc2.bias.grad[0] = float("inf")
        finish_step(model, optimizer, scaler)
        finite = bool(flat_parameters(model).isfinite().all())
        records.append(StepRecord(scaler.get_scale(), fingerprint(model), finite))
        if verify:
            check_agreement(model, scaler)
    return records, flat_parameters(model)


def train_clipped(
    rank: int, world_size: int, clip: float, **settings
) -> tuple[list[StepRecord], torch.Tensor]:
    """`train_scaled` with the scale 1 and gradients clipped to the norm `clip`."""

    def finish_step(model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> None:
        average_then_look(model, optimizer, scaler, clip)

    return train_scaled(rank, world_size, finish_step, init_scale=1.0, **settings)


class DDPResult(NamedTuple):
    """One rank after training: losses, fingerprint of the weights, loss scale, weights."""

    losses: list[float]
    fingerprint: str
    scale: float
    parameters: torch.Tensor


def train_with_ddp(
    rank: int,
    world_size: int,
    dtype: torch.dtype = torch.float32,
    hook: str = "float32",
    scale: float = 1.0,
    steps: int = 4,
) -> DDPResult:
    """DDP averages while backward runs; forward under autocast, buckets sent as `hook` says.

    The last step is inside a span "step". A scale of 1 switches the scaler off.
    """
    data, (module, optimizer) = digits(), new_model()
    model = DistributedDataParallel(module)
    HOOKS[hook](model)
    scaler = new_scaler(module, init_scale=scale, enabled=scale != 1.0)
    losses = []
    batches = global_batches(rank, world_size, len(data), 120, seed=1, epoch=0)
    for step, mine in enumerate(batches[:steps]):
        optimizer.zero_grad()
        with span("step" if step == steps - 1 else "before"):
            with autocast(data.images.device.type, dtype):
                loss = nll_loss(model(data.images[mine]), data.labels[mine])
            scaler.scale(loss).backward()  # the averages are there when it returns
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return DDPResult(losses, fingerprint(module), scaler.get_scale(), flat_parameters(module))
