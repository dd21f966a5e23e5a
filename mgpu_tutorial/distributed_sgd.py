"""Distributed SGD: each rank computes a gradient, they average, all take the same step."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import avg_pool2d, nll_loss
from torch.optim.lr_scheduler import LambdaLR

from mgpu_tutorial.data_partitioning import global_batches
from mgpu_tutorial.lab import progress, status
from mgpu_tutorial.shared import checkpoint as checkpoints
from mgpu_tutorial.shared.data import Digits, digits
from mgpu_tutorial.shared.models import SmallConvNet

STATEFUL = {"model", "optimizer", "scheduler"}  # parts of a run with a state_dict


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over all ranks: one all_reduce per parameter."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= dist.get_world_size()


def average_flat(model: nn.Module) -> None:
    """The mean over all ranks with one all_reduce for all parameters together."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    flat /= dist.get_world_size()
    pieces = flat.split([gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))


def new_model(
    seed: int = 0, lr: float = 0.01, **layers: float | str
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network whose weights depend on `seed` only, and its optimizer."""
    torch.manual_seed(seed)
    model = SmallConvNet(**layers)
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)


def flat_parameters(model: nn.Module) -> torch.Tensor:
    """All parameters of `model` as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def take_steps(rank: int, world_size: int, steps: int = 5, batch: int = 60) -> torch.Tensor:
    """Take `steps` steps, the ranks sharing each batch of `batch`; returns the parameters."""
    data = digits()
    model, optimizer = new_model()
    batches = global_batches(rank, world_size, len(data), batch, seed=1, epoch=0)
    for mine in batches[:steps]:
        optimizer.zero_grad()
        nll_loss(model(data.images[mine]), data.labels[mine]).backward()
        average_gradients(model)
        optimizer.step()
    return flat_parameters(model)


def mean_loss(output: torch.Tensor, labels: torch.Tensor, batch: int) -> torch.Tensor:
    """The mean loss of this rank's samples, however many there are."""
    return nll_loss(output, labels)


def shared_loss(output: torch.Tensor, labels: torch.Tensor, batch: int) -> torch.Tensor:
    """This rank's part of the mean over the global `batch`, for gradients to be averaged."""
    return nll_loss(output, labels, reduction="sum") * dist.get_world_size() / batch


def vary_steps(
    rank: int,
    world_size: int,
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]] = new_model,
    loss_of: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] = mean_loss,
    synchronise: Callable[[nn.Module], None] = average_gradients,
    steps: int = 5,
    batch: int = 60,
) -> torch.Tensor:
    """`take_steps` with three places where it can be varied; returns the parameters."""
    data = digits()
    model, optimizer = make()
    batches = global_batches(rank, world_size, len(data), batch, seed=1, epoch=0)
    for mine in batches[:steps]:
        optimizer.zero_grad()
        loss_of(model(data.images[mine]), data.labels[mine], batch).backward()
        synchronise(model)
        optimizer.step()
    return flat_parameters(model)


def mean_of_means(counts: list[torch.Tensor]) -> list[float]:
    """The mean of each micro-batch, divided by their number."""
    return [1 / (int(count) * len(counts)) for count in counts]


def by_all_tokens(counts: list[torch.Tensor]) -> list[float]:
    """Every token counts alike, whichever rank and micro-batch it is in."""
    total = sum(counts)
    dist.all_reduce(total)  # one number per step
    return [dist.get_world_size() / int(total)] * len(counts)


def accumulate_steps(
    rank: int,
    world_size: int,
    micro_batch: int,
    accumulation: int,
    factors_of: Callable[[list[torch.Tensor]], list[float]] = mean_of_means,
    longest: int = 1,
) -> torch.Tensor:
    """Five steps of several micro-batches each; a digit stands for 1 to `longest` tokens."""
    data = digits()
    tokens = 1 + data.labels % longest
    model, optimizer = new_model()
    batch = world_size * micro_batch * accumulation
    batches = global_batches(rank, world_size, len(data), batch, seed=1, epoch=0)
    for mine in batches[:5]:
        optimizer.zero_grad()
        parts = torch.tensor(mine).split(micro_batch)
        factors = factors_of([tokens[part].sum() for part in parts])
        for part, factor in zip(parts, factors, strict=True):
            losses = nll_loss(model(data.images[part]), data.labels[part], reduction="none")
            (factor * (losses * tokens[part]).sum()).backward()  # gradients add up
        average_gradients(model)  # once per step
        optimizer.step()
    return flat_parameters(model)


def train_each(rank: int, world_size: int, runs: list[tuple]) -> list[float]:
    """The loss that each run ends with; a run is (batch, optimizer, steps of warm-up)."""
    data = digits()
    return [train_small(data, *run) for run in runs]


def train_small(data: Digits, batch: int, make_optimizer: Callable, warm_up: int) -> float:
    """Train a small network for four epochs; returns its mean loss over all `data`."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images = avg_pool2d(data.images, 4).flatten(1)  # 49 pixels, so that a run is short
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(49, 64), nn.ReLU(), nn.Linear(64, 10), nn.LogSoftmax(1))
    optimizer = make_optimizer(model.parameters())
    ramp = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up))
    for epoch in range(4):
        batches = global_batches(rank, world_size, len(data), batch, seed=1, epoch=epoch)
        for step, mine in enumerate(batches):
            whole = min(batch, len(data) - step * batch)  # the last batch is smaller
            optimizer.zero_grad()
            shared_loss(model(images[mine]), data.labels[mine], whole).backward()
            average_gradients(model)
            optimizer.step()
            ramp.step()
    with torch.no_grad():
        return nll_loss(model(images), data.labels).item()


def train(
    rank: int,
    world_size: int,
    epochs: int = 3,
    batch: int = 128,
    lr: float = 0.01,
    checkpoint: str = "",
    double: bool = False,
    synchronise: Callable = average_gradients,
) -> tuple[list[list[float]], torch.Tensor]:
    """Train on the digits; all ranks return the losses of every epoch, and the parameters.

    A row of losses: each rank's mean over its share, then the mean over all samples. A run
    goes on from the file `checkpoint`, on any number of ranks. `double`: in float64.
    """
    if epochs < 1 or batch < 1:
        raise ValueError(f"epochs and batch must be at least 1, got {epochs} and {batch}")
    model, optimizer = new_model(lr=lr)
    if double:
        model.double()
    data = digits(dtype=torch.float64 if double else torch.float32)
    losses, same = [], {"batch": batch, "lr": lr, "double": double}
    if checkpoint:
        losses = checkpoints.load(checkpoint, model, optimizer, **same).get("losses", [])
    for epoch in progress(range(len(losses), epochs)):
        losses.append(train_epoch(model, optimizer, data, epoch, batch, synchronise))
        line = f"epoch {epoch}: loss {losses[-1][rank]:.4f}, all ranks {losses[-1][-1]:.4f}"
        print(f"rank {rank}, {line}")
        status(line)
        if checkpoint:
            checkpoints.save(checkpoint, model, optimizer, losses=losses, **same)
    return losses, flat_parameters(model)


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Digits,
    epoch: int,
    batch: int,
    synchronise: Callable,
) -> list[float]:
    """One pass over the data; returns each rank's mean loss, then that over all samples."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = data.images.new_zeros(2)  # the sum of the losses, the number of samples
    batches = global_batches(rank, world_size, len(data), batch, seed=1, epoch=epoch)
    for step, share in enumerate(batches):
        whole = min(batch, len(data) - step * batch)  # the last batch is smaller
        optimizer.zero_grad()
        loss = nll_loss(model(data.images[share]), data.labels[share], reduction="sum")
        (loss * world_size / whole).backward()  # averaged: the sum over all ranks / whole
        synchronise(model)
        optimizer.step()
        mine += mine.new_tensor([loss.item(), len(share)])
    ranks = [torch.zeros_like(mine) for _ in range(world_size)]
    dist.all_gather(ranks, mine)
    return [float(losses / samples) for losses, samples in [*ranks, sum(ranks)]]


def new_run(rank: int) -> dict[str, Any]:
    """Everything that a run carries from step to step, under its names in a checkpoint."""
    model, optimizer = new_model(dropout=0.5)
    torch.manual_seed(rank)  # dropout draws other numbers on each rank
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / 8)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}


def go_on(run: dict[str, Any], steps: int) -> None:
    """Take the next `steps` steps of a run."""
    data = digits()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = global_batches(rank, world_size, len(data), 60, seed=1, epoch=0)
    for mine in batches[run["step"] :][:steps]:
        run["optimizer"].zero_grad()
        nll_loss(run["model"](data.images[mine]), data.labels[mine]).backward()
        average_gradients(run["model"])
        run["optimizer"].step()
        run["scheduler"].step()
        run["step"] += 1


def save_run(run: dict[str, Any]) -> dict[str, Any]:
    """The state with which a new process takes the same next step as this one."""
    saved = {name: run[name].state_dict() for name in STATEFUL}
    saved |= {"step": run["step"], "generator": torch.get_rng_state()}
    return copy.deepcopy(saved)  # like a file, it does not change with the run


def load_run(run: dict[str, Any], saved: dict[str, Any]) -> None:
    """Restore the parts that are in `saved`; the others stay as they are in a new run."""
    for name in STATEFUL & saved.keys():
        run[name].load_state_dict(saved[name])
    run["step"] = saved.get("step", 0)
    torch.set_rng_state(saved.get("generator", torch.get_rng_state()))


def stop_and_resume(
    rank: int, world_size: int, forget: str = "", stop_after: int = 3
) -> torch.Tensor:
    """Six steps, with a checkpoint on the way that lacks `forget`; returns the parameters."""
    run = new_run(rank)
    go_on(run, stop_after)
    saved = save_run(run)
    saved.pop(forget, None)
    run = new_run(rank)  # all that a new process has
    load_run(run, saved)
    go_on(run, 6 - stop_after)
    return flat_parameters(run["model"])
