"""The comparison's experiment: one network, one global batch, trained in six ways.

A device is a GPU, or one CPU core: a process with one thread, or one of the virtual devices
of this package's DataParallel. With DDP all ranks average their gradients during backward.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial import lab
from mgpu_tutorial.data_parallel.wrapper import DataParallel
from mgpu_tutorial.ddp_reducer.hooks import as_bfloat16
from mgpu_tutorial.lab import Ledger, span
from mgpu_tutorial.shared.data import Pictures, pictures
from mgpu_tutorial.shared.vision import torchvision


class Setup(NamedTuple):
    """How a row trains: "" on one device, "DataParallel" or "DDP" on several."""

    wrapper: str = ""
    autocast: bool = False
    hook: str = ""


SETUPS = {
    "one device": Setup(),
    "one device + autocast": Setup(autocast=True),
    "DataParallel": Setup("DataParallel"),
    "DDP": Setup("DDP"),
    "DDP + autocast": Setup("DDP", autocast=True),
    "DDP + compression hook": Setup("DDP", hook="bfloat16"),
}


class Experiment(NamedTuple):
    """A network of torchvision, pictures in a global batch, pixels of a side, iterations."""

    network: str
    batch: int
    side: int
    iterations: int


class SetupResult(NamedTuple):
    """Of one rank: seconds of forward, backward and update of each iteration but the first;
    losses of all; bytes by category on each of its devices, of the first iteration; CUDA's
    peaks in bytes; its process."""

    seconds: list[list[float]]
    losses: list[float]
    memory: list[dict[str, int]]
    peaks: list[int]
    pid: int


def now() -> float:
    """The clock in seconds, once the GPU has done what it was told."""
    if kind() == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def train_setup(
    rank: int,
    world_size: int,
    setup: Setup,
    experiment: Experiment,
    count: int = 1,
    clock: Callable[[], float] = now,
) -> SetupResult:
    """Train on this rank's share of each global batch; with DDP all ranks average gradients.

    `count` is the number of devices that DataParallel's one process takes. `clock` tells
    the seconds: on the wall, or of the processor.
    """
    several = setup.wrapper == "DataParallel"
    devices = lab.devices(count) if several else [torch.get_default_device()]
    steps = experiment.iterations + 1
    module, optimizer, schedule = new_network(experiment.network, steps, devices[0])
    model, ledger = wrap(module, setup, devices), Ledger()
    with torch.device("cpu"):
        data = pictures()
    seconds, losses = [], []
    for step in range(steps):
        batch = draw_share(rank, world_size, data, experiment, step)
        images, labels = (tensor.to(devices[0]) for tensor in batch)
        # the first iteration is counted, the others are timed
        with nullcontext() if losses else ledger.saved_for_backward(module):
            times = [clock()]
            with torch.autocast(kind(), torch.bfloat16, setup.autocast):
                loss = cross_entropy(model(images), labels)
            times.append(clock())
            optimizer.zero_grad()
            loss.backward()
            times.append(clock())
            optimizer.step()
            schedule.step()
            times.append(clock())
        seconds.append([end - begin for begin, end in pairwise(times)])
        losses.append(loss.item())
        if step == 0:
            ledger.record_state(module, optimizer)
    memory = [ledger[device] for device in ledger.devices]
    peaks = [torch.cuda.max_memory_allocated(d) for d in devices if d.type == "cuda"]
    return SetupResult(seconds[1:], losses, memory, peaks, os.getpid())


def new_network(
    name: str, steps: int, home: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """One of torchvision's networks for ten classes, SGD, and a cosine schedule."""
    torch.manual_seed(0)
    module = torchvision.models.get_model(name, num_classes=10).to(home)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    return module, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def wrap(
    module: nn.Module, setup: Setup, devices: Sequence[torch.device]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The module as `setup` trains it; DataParallel takes all `devices`."""
    if setup.wrapper == "DDP":
        model = DistributedDataParallel(module, gradient_as_bucket_view=True)
        if setup.hook:
            model.register_comm_hook(None, as_bfloat16)
        return model
    if setup.wrapper == "DataParallel":
        return nn.DataParallel(module) if kind() == "cuda" else DataParallel(module, devices)
    return module


def draw_share(
    rank: int, world_size: int, data: Pictures, experiment: Experiment, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every world_size-th picture of the step's global batch, from number `rank` on."""
    first = step * experiment.batch
    mine = range(first + rank, first + experiment.batch, world_size)
    return data.batch([i % len(data) for i in mine], experiment.side)


def kind() -> str:
    """ "cuda" in a rank that computes on a GPU, else "cpu"."""
    return torch.get_default_device().type


def train_each(
    rank: int, world_size: int, names: Sequence[str], experiment: Experiment
) -> dict[str, SetupResult]:
    """Train as each of the SETUPS named, inside a span of its name; two for DataParallel."""
    results = {}
    for name in names:
        with span(name):
            results[name] = train_setup(rank, world_size, SETUPS[name], experiment, count=2)
    return results
