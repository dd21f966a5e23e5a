"""Distributed SGD: each rank computes a gradient, they average, all take the same step."""

import os
import signal
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import nll_loss

from mgpu_tutorial.data_partitioning import global_batches
from mgpu_tutorial.lab import progress, span, status
from mgpu_tutorial.shared import checkpoint as checkpoints
from mgpu_tutorial.shared.data import Digits, digits
from mgpu_tutorial.shared.models import SmallConvNet


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over all ranks: one all_reduce a parameter."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= dist.get_world_size()


def sum_gradients(model: nn.Module) -> None:
    """Replace each gradient by its sum over all ranks: N times too long a step."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)


def keep_gradients(model: nn.Module) -> None:
    """No synchronisation at all: every rank goes its own way."""


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
    seed: int = 0, lr: float = 0.01, double: bool = False, **layers: float | str
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network whose weights depend on `seed` only, and its optimizer."""
    torch.manual_seed(seed)
    model = SmallConvNet(**layers)
    if double:
        model.double()
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)


def flat_parameters(model: nn.Module) -> torch.Tensor:
    """All parameters of `model` as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def by_share(share: int, batch: int, world_size: int) -> float:
    """What a mean loss over `share` of `batch` samples must count in the ranks' average."""
    return share * world_size / batch


def after_steps(
    rank: int,
    world_size: int,
    synchronise: Callable = average_gradients,
    steps: int = 5,
    batch: int = 60,
    reduction: str = "mean",
    weight: Callable | None = None,
    own_start: bool = False,
    lr: float = 0.01,
) -> torch.Tensor:
    """Take `steps` steps on this rank's share of each global batch; returns parameters."""
    data = digits()
    model, optimizer = new_model(seed=rank if own_start else 0, lr=lr)
    order = global_batches(rank, world_size, len(data), batch, seed=1, epoch=0)
    for mine in order[:steps]:
        optimizer.zero_grad()
        loss = nll_loss(model(data.images[mine]), data.labels[mine], reduction=reduction)
        if weight:
            loss = loss * weight(len(mine), batch, world_size)
        loss.backward()
        synchronise(model)
        optimizer.step()
    return flat_parameters(model)


def drift(rank: int, world_size: int, synchronise: Callable, steps: int) -> list[float]:
    """The distance of this rank's parameters to rank 0's after each step."""
    data = digits()
    model, optimizer = new_model()
    distances = []
    for mine in global_batches(rank, world_size, len(data), 60, seed=1, epoch=0)[:steps]:
        optimizer.zero_grad()
        nll_loss(model(data.images[mine]), data.labels[mine]).backward()
        synchronise(model)
        optimizer.step()
        mine_flat = flat_parameters(model)
        first = mine_flat.clone()
        dist.broadcast(first, src=0)
        distances.append((mine_flat - first).norm().item())
    return distances


def with_layers(
    rank: int, world_size: int, steps: int = 3, **layers: float | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Train a network with these layers; returns its parameters and some predictions."""
    data = digits()
    model, optimizer = new_model(**layers)
    torch.manual_seed(rank)  # so that dropout draws another mask on each rank
    for mine in global_batches(rank, world_size, len(data), 60, seed=1, epoch=0)[:steps]:
        optimizer.zero_grad()
        nll_loss(model(data.images[mine]), data.labels[mine]).backward()
        average_gradients(model)
        optimizer.step()
    model.eval()  # dropout off; BatchNorm takes its running statistics
    with torch.no_grad():
        return flat_parameters(model), model(data.images[:20])


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
    model, optimizer = new_model(lr=lr, double=double)
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


class PowerCut:
    """Averages gradients until rank 1, at its step number `step`, is killed."""

    def __init__(self, step: int) -> None:
        self.left = step

    def __call__(self, model: nn.Module) -> None:
        self.left -= 1
        if self.left < 0 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        average_gradients(model)


def correct(parameters: torch.Tensor, images: torch.Tensor, labels: torch.Tensor) -> int:
    """How many of these digits (an int) a network with these parameters reads correctly."""
    model = SmallConvNet()
    nn.utils.vector_to_parameters(parameters, model.parameters())
    with torch.no_grad():
        return int((model(images).argmax(dim=1) == labels).sum())


def accuracy(parameters: torch.Tensor) -> float:
    """The share of all test digits that is read correctly."""
    data = digits(train=False)
    return correct(parameters, data.images, data.labels) / len(data)


def step_times(
    rank: int, world_size: int, methods: list[Callable], steps: int = 10, batch: int = 128
) -> dict[str, tuple[float, float]]:
    """The least seconds per step, in computation and communication, by method."""
    data = digits()
    model, _ = new_model()
    batches = global_batches(rank, world_size, len(data), batch, seed=1, epoch=0)
    times: dict[str, list[tuple[float, float]]] = {m.__name__: [] for m in methods}
    for mine in batches[:steps]:
        for method in methods:
            dist.barrier()
            begin = time.perf_counter()
            with span("compute"):
                model.zero_grad()
                nll_loss(model(data.images[mine]), data.labels[mine]).backward()
            middle = time.perf_counter()
            with span("synchronise"):
                method(model)
            times[method.__name__].append((middle - begin, time.perf_counter() - middle))
    return {
        name: tuple(min(seconds) for seconds in zip(*pairs, strict=True))
        for name, pairs in times.items()
    }
