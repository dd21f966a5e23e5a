"""Apparatus: the processor seconds of one step, by its parts.

A clock on the wall also counts waiting, and what else the machine does meanwhile. Processor
seconds count what all threads of one process have computed.
"""

from contextlib import nullcontext
from time import process_time
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

from mgpu_tutorial.comparison.training import Experiment, Setup, new_network, wrap
from mgpu_tutorial.lab import devices


class Parts(NamedTuple):
    """Processor seconds of one step: forward with its loss, backward, and update."""

    forward: float
    backward: float
    update: float


def time_parts(
    rank: int, world_size: int, setup: Setup, experiment: Experiment, average: bool = True
) -> Parts:
    """Each rank repeats one step on its share; with DDP they average, unless told not to.

    The pictures are random: what a step costs is the same for any.
    Returns the least processor seconds of each part over `experiment.iterations` steps.
    """
    taken = devices(2) if setup.wrapper == "DataParallel" else ()
    home = taken[0] if taken else torch.get_default_device()
    module, optimizer, _ = new_network(experiment.network, 1, home)
    model = wrap(module, setup, taken)
    count = experiment.batch // world_size
    images = torch.rand(count, 3, experiment.side, experiment.side, device=home)
    labels = torch.arange(count, device=home) % 10
    found = []
    for _ in range(experiment.iterations + 1):
        begin = process_time()
        with nullcontext() if average else model.no_sync():
            loss = cross_entropy(model(images), labels)
            forward = process_time()
            optimizer.zero_grad()
            loss.backward()
        backward = process_time()
        optimizer.step()
        end = process_time()
        found.append(Parts(forward - begin, backward - forward, end - backward))
    return Parts(*map(min, zip(*found[1:], strict=True)))
