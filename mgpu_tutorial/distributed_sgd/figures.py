"""Apparatus, not the lesson: a step as a film, and a table of losses."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import avg_pool2d, cross_entropy, nll_loss
from torch.optim import SGD

from mgpu_tutorial.data_partitioning import global_batches
from mgpu_tutorial.distributed_sgd.sgd import average_gradients, new_model
from mgpu_tutorial.lab import Table, frame, launch
from mgpu_tutorial.shared.data import digits

GREY = 7  # the number of a colour that is no rank's here


def step_film(
    rank: int, world_size: int, average: Callable[[nn.Module], None] = average_gradients
) -> None:
    """One training step of the ranks, with a frame after each part."""
    data, (model, optimizer) = digits(), new_model()
    mine = global_batches(rank, world_size, len(data), 60, seed=1, epoch=0)[0]
    held = {"samples": (f"{len(mine)} of 60", rank), "weights": ("w", GREY)}
    frame("All begin with the same weights, and each takes its share of the batch.", held)
    nll_loss(model(data.images[mine]), data.labels[mine]).backward()
    held["gradient"] = [rank]
    frame("Backward: each rank has the gradient of its own share.", held)
    average(model)
    held["gradient"] = range(world_size)
    frame("The all-reduce leaves the same mean on every rank, with a part from each.", held)
    optimizer.step()
    held["weights"] = ("new w", GREY)
    frame("So every rank takes the same step, and the weights are the same again.", held)


def loss_at(rank: int, world_size: int, jobs: list[tuple[int, float]]) -> list[float]:
    """The loss of one process that stands for k ranks with 16 samples each, for (k, rate)."""
    data, losses = digits(), []
    images = avg_pool2d(data.images, 4).flatten(1)
    for k, rate in jobs:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(49, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = SGD(model.parameters(), lr=rate, momentum=0.5)
        for epoch in range(4):
            for mine in global_batches(0, 1, len(data), 16 * k, seed=1, epoch=epoch):
                optimizer.zero_grad()
                cross_entropy(model(images[mine]), data.labels[mine]).backward()
                optimizer.step()
        losses.append(cross_entropy(model(images), data.labels).item())
    return losses


def learning_rates() -> Table:
    """The losses by rule and by k, from one rank: its single thread is quicker here."""
    ranks, powers = (1, 2, 4, 8), {"same rate": 0, "square root": 0.5, "linear": 1}
    jobs = {(rule, k): (k, 0.02 * k**p) for rule, p in powers.items() for k in ranks}
    different = list(dict.fromkeys(jobs.values()))  # all rules agree on one rank
    (losses,) = launch(loss_at, 1, different).results
    found = dict(zip(different, losses, strict=True))
    rows = [[rule, *(f"{found[jobs[rule, k]]:.2f}" for k in ranks)] for rule in powers]
    return Table(["loss after 4 epochs", *(f"{k} × 16" for k in ranks)], rows)
