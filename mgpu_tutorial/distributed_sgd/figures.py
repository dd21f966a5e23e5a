"""Apparatus, not the lesson: a step as a film, and tables of distances and of losses."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import avg_pool2d, nll_loss
from torch.nn.utils import vector_to_parameters
from torch.optim import SGD

from mgpu_tutorial.data_partitioning import global_batches
from mgpu_tutorial.distributed_sgd.sgd import average_gradients, flat_parameters, new_model
from mgpu_tutorial.lab import Table, frame, launch
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet

GREY = 7  # the number of a colour that is no rank's here
RANKS = (1, 2, 4, 8)


def step_film(rank: int, world_size: int) -> torch.Tensor:
    """One step of `take_steps` with a frame after each part; returns the parameters."""
    data, (model, optimizer) = digits(), new_model()
    mine = global_batches(rank, world_size, len(data), 60, seed=1, epoch=0)[0]
    held = {"samples": (f"{len(mine)} of 60", rank), "weights": ("w", GREY)}
    frame(
        "All ranks begin with the same weights, and each takes its share of the batch.", held
    )
    nll_loss(model(data.images[mine]), data.labels[mine]).backward()
    held["gradient"] = [rank]
    frame("Backward: each rank has the gradient of its own share.", held)
    average_gradients(model)
    held["gradient"] = range(world_size)
    frame("The all-reduce leaves the same mean on every rank, with a part from each.", held)
    optimizer.step()
    held["weights"] = ("new w", GREY)
    frame("So every rank takes the same step, and the weights are the same again.", held)
    return flat_parameters(model)


def equality(worker: Callable) -> Table:
    """How far any parameter of several ranks ends from one process, and from another rank."""
    one, rows = launch(worker, 1).results[0], []
    for ranks in (2, 3, 4):
        results = launch(worker, ranks).results
        far = distance(results, one), distance(results, results[0])
        rows.append([ranks, *map(_digit, far)])
    return Table(["ranks", "from one process", "from each other"], rows)


def compare(worker: Callable, steps: int = 5, **arguments: object) -> Table:
    """How far one process has moved, and two ranks are from it and from each other."""
    rows, start = [], []
    for when, taken in ("at the start", 0), (f"after step {steps}", steps):
        one, two = (launch(worker, n, steps=taken, **arguments).results for n in (1, 2))
        start = start or one
        far = distance(one, start[0]), distance(two, one[0]), distance(two, two[0])
        rows.append([when, *map(_digit, far)])
    return Table(["", "one process moved", "two ranks from it", "from each other"], rows)


def distance(results: list[torch.Tensor], reference: torch.Tensor) -> float:
    """The largest difference between a parameter of any rank and the reference."""
    return max(largest_difference(result, reference) for result in results)


def _digit(far: float) -> str:
    return "0" if far == 0 else "below 1e-6" if far < 1e-6 else f"{far:.1e}"


def training_table(report: Report) -> Table:
    """Every second epoch's losses of a launch of `train`; prints what its network reads."""
    losses, parameters = report.results[0]
    model, test = SmallConvNet(), digits(train=False)
    vector_to_parameters(parameters, model.parameters())
    with torch.no_grad():
        hits = model(test.images).argmax(dim=1) == test.labels
    print(f"{hits.float().mean():.1%} of {len(test)} test digits are classified correctly")
    header = ["epoch", *(f"rank {r}" for r in range(report.world_size)), "all samples"]
    rows = [[epoch, *(f"{loss:.3f}" for loss in row)] for epoch, row in enumerate(losses)]
    return Table(header, rows[::2])


def learning_rates() -> Table:
    """The loss after four epochs for batches of 16 to 128 samples, by rule for the rate."""
    rows = []
    for rule, power in {"same rate": 0, "square root": 0.5, "linear": 1}.items():
        losses = launch(_losses, 1, power).results[0]
        rows.append([rule, *(f"{loss:.2f}" for loss in losses)])
    return Table(["loss after 4 epochs", *(f"{k} × 16" for k in RANKS)], rows)


def _losses(rank: int, world_size: int, power: float) -> list[float]:
    """A perceptron on 49 pixels. One process stands for k ranks with 16 samples each."""
    data, losses = digits(), []
    images = avg_pool2d(data.images, 4).flatten(1)
    for k in RANKS:
        torch.manual_seed(0)
        layers = nn.Linear(49, 64), nn.ReLU(), nn.Linear(64, 10), nn.LogSoftmax(1)
        model = nn.Sequential(*layers)
        optimizer = SGD(model.parameters(), lr=0.02 * k**power, momentum=0.5)
        for epoch in range(4):
            for mine in global_batches(0, 1, len(data), 16 * k, seed=1, epoch=epoch):
                optimizer.zero_grad()
                nll_loss(model(images[mine]), data.labels[mine]).backward()
                optimizer.step()
        losses.append(nll_loss(model(images), data.labels).item())
    return losses
