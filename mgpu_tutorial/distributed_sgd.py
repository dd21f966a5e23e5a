"""Distributed SGD: each rank computes a gradient, they average, all take the same step."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import nll_loss

from mgpu_tutorial.data import digits
from mgpu_tutorial.data_partitioning import global_batches
from mgpu_tutorial.lab import progress, span
from mgpu_tutorial.models import SmallConvNet

CHAPTER = 5


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


def new_model(seed: int = 0, lr: float = 0.01) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network whose weights depend on `seed` only, and its optimizer."""
    torch.manual_seed(seed)
    model = SmallConvNet()
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)


def flat_parameters(model: nn.Module) -> torch.Tensor:
    """All parameters of `model` as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def after_steps(
    rank: int,
    world_size: int,
    synchronise: Callable = average_gradients,
    steps: int = 5,
    batch: int = 120,
    reduction: str = "mean",
    weighted: bool = False,
    own_start: bool = False,
) -> torch.Tensor:
    """Take `steps` steps on this rank's share of each global batch; returns parameters."""
    data = digits()
    model, optimizer = new_model(seed=rank if own_start else 0)
    order = global_batches(rank, world_size, len(data), batch, seed=1, epoch=0)
    for mine in order[:steps]:
        optimizer.zero_grad()
        loss = nll_loss(model(data.images[mine]), data.labels[mine], reduction=reduction)
        if weighted:  # a mean of means counts a small share like a large one
            loss = loss * len(mine) * world_size / batch
        loss.backward()
        synchronise(model)
        optimizer.step()
    return flat_parameters(model)


def drift(rank: int, world_size: int, synchronise: Callable, steps: int) -> list[float]:
    """The distance of this rank's parameters to rank 0's after each step."""
    data = digits()
    model, optimizer = new_model()
    distances = []
    for mine in global_batches(rank, world_size, len(data), 120, seed=1, epoch=0)[:steps]:
        optimizer.zero_grad()
        nll_loss(model(data.images[mine]), data.labels[mine]).backward()
        synchronise(model)
        optimizer.step()
        mine_flat = flat_parameters(model)
        first = mine_flat.clone()
        dist.broadcast(first, src=0)
        distances.append((mine_flat - first).norm().item())
    return distances


def train(
    rank: int, world_size: int, epochs: int = 3, batch: int = 128, lr: float = 0.01
) -> tuple[list[float], torch.Tensor]:
    """Train on the digits; returns this rank's loss of each epoch, and the parameters."""
    data = digits()
    model, optimizer = new_model(lr=lr)
    losses = []
    for epoch in progress(range(epochs)):
        total = 0.0
        batches = global_batches(rank, world_size, len(data), batch, seed=1, epoch=epoch)
        for mine in batches:
            optimizer.zero_grad()
            loss = nll_loss(model(data.images[mine]), data.labels[mine])
            loss.backward()
            average_gradients(model)
            optimizer.step()
            total += loss.item()
        losses.append(total / len(batches))
        print(f"rank {rank}, epoch {epoch}: loss {losses[-1]:.3f}")
    return losses, flat_parameters(model)


def accuracy(parameters: torch.Tensor) -> float:
    """The share of test digits that a network with these parameters reads correctly."""
    model, _ = new_model()
    nn.utils.vector_to_parameters(parameters, model.parameters())
    data = digits(train=False)
    with torch.no_grad():
        return (model(data.images).argmax(dim=1) == data.labels).float().mean().item()


def step_times(
    rank: int, world_size: int, methods: list[Callable], steps: int = 10, batch: int = 128
) -> dict[str, tuple[float, float]]:
    """Median seconds a step, in computation and in communication, for each method in turn."""
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
    medians = {
        name: torch.tensor(pairs).median(dim=0).values for name, pairs in times.items()
    }
    return {name: tuple(median.tolist()) for name, median in medians.items()}
