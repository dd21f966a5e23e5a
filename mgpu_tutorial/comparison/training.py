"""The comparison's experiment: one network, one global batch, trained in six ways.

A device is a GPU, or one CPU core: a process with one thread, or one of the virtual devices
of this package's DataParallel. With DDP all ranks average their gradients during backward.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

from mgpu_tutorial import lab
from mgpu_tutorial.data_parallel.wrapper import DataParallel
from mgpu_tutorial.ddp_reducer.hooks import as_bfloat16
from mgpu_tutorial.lab import Ledger
from mgpu_tutorial.shared.data import Pictures
from mgpu_tutorial.shared.vision import torchvision


class Setup(NamedTuple):
    """How a row trains: "" on one device, "DataParallel" or "DDP" on several."""

    wrapper: str = ""
    autocast: bool = False
    hook: bool = False


SETUPS = {
    "one device": Setup(),
    "one device + autocast": Setup(autocast=True),
    "DataParallel": Setup("DataParallel"),
    "DDP": Setup("DDP"),
    "DDP + autocast": Setup("DDP", autocast=True),
    "DDP + compression hook": Setup("DDP", hook=True),
}


class Experiment(NamedTuple):
    """A network of torchvision, pictures in a global batch, pixels of a side, iterations."""

    network: str
    batch: int
    side: int
    iterations: int


def wrap(module: nn.Module, setup: Setup, devices: Sequence[torch.device]) -> Callable:
    """The module as `setup` trains it; DataParallel takes all `devices`."""
    if setup.wrapper == "DDP":
        module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    if setup.hook:
        module.register_comm_hook(None, as_bfloat16)
    if setup.wrapper == "DataParallel":
        on_gpus = devices[0].type == "cuda"
        return nn.DataParallel(module) if on_gpus else DataParallel(module, devices)
    return module


def draw_share(
    rank: int, world_size: int, data: Pictures, experiment: Experiment, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every world_size-th picture of the step's global batch, from number `rank` on."""
    if experiment.batch % world_size:
        why = "the mean of unequal parts is not the mean of the batch; take one that divides"
        raise ValueError(f"a batch of {experiment.batch} for {world_size} ranks: {why}")
    first = step * experiment.batch
    mine = range(first + rank, first + experiment.batch, world_size)
    return data.batch([i % len(data) for i in mine], experiment.side)


def train_setup(
    rank: int,
    world_size: int,
    data: Pictures,
    setup: Setup,
    experiment: Experiment,
    count: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list]:
    """Train on this rank's share of each global batch; with DDP all ranks average gradients.

    `count` is the number of devices that DataParallel's one process takes. Returns seconds
    of forward, backward and update, losses, and bytes by category on each device.
    """
    draw_share(rank, world_size, data, experiment, 0)  # refuses a batch that does not divide
    home, steps = torch.get_default_device(), experiment.iterations + 1
    devices = lab.devices(count) if setup.wrapper == "DataParallel" else [home]
    torch.manual_seed(0)
    module = torchvision.models.get_model(experiment.network, num_classes=10)
    module = module.to(devices[0])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    schedule = CosineAnnealingLR(optimizer, steps)
    model, ledger = wrap(module, setup, devices), Ledger()
    seconds, losses = [], []
    for step in range(steps):
        batch = draw_share(rank, world_size, data, experiment, step)
        images, labels = (tensor.to(devices[0]) for tensor in batch)
        # the first iteration is counted, the others are timed
        with nullcontext() if losses else ledger.saved_for_backward(module):
            times = [clock()]
            with torch.autocast(home.type, torch.bfloat16, setup.autocast):
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
    return {"seconds": seconds[1:], "losses": losses, "memory": memory}
