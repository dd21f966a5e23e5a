"""Apparatus, not the lesson: records, counts and times the steps of any wrapper."""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.collectives import ring_seconds
from mgpu_tutorial.ddp_buckets.experiments import (
    Tower,
    Wrapper,
    finish_gradient_synchronization,
    wrap,
)
from mgpu_tutorial.lab import slow_link, span
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.shared.cost_model import Link


@dataclass(frozen=True)
class Experiment:
    """A Tower of `width` and `depth`, a rank's `batch`, and the network between the ranks.

    `bucket_cap_mb` is in MiB; None leaves a wrapper its own. `pause` is in seconds, for the
    backward of each layer. `link` replaces this machine's own network: its latency is in
    seconds per message, its bandwidth in bytes per second.
    """

    width: int = 512
    depth: int = 6
    batch: int = 128
    bucket_cap_mb: float | None = 1.0
    pause: float = 0.0
    link: Link | None = None

    def tower(self) -> Tower:
        return Tower(self.width, self.depth, self.pause)

    def inputs(self) -> torch.Tensor:
        return torch.randn(self.batch, self.width)

    def network(self, world_size: int) -> AbstractContextManager:
        """Inside, an all_reduce takes as long as a ring of `world_size` over the link."""
        if self.link is None:
            return nullcontext()
        link = self.link
        return slow_link(
            lambda nbytes: ring_seconds(nbytes, world_size, link.latency, link.bandwidth)
        )


def calling_from_python(model: nn.Module) -> nn.Module:
    """The same model; torch's DDP makes its all_reduces in Python from now on.

    It would make them in C++, where neither the trace nor a slow link sees them. The hook
    that it gets makes the same calls.
    """
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, allreduce_hook)
    return model


def record_steps(
    rank: int, world_size: int, wrapper: Wrapper, experiment: Experiment
) -> None:
    """The ranks take three steps in one of the WRAPPERS, such that each can be drawn."""
    model = wrap(wrapper, experiment.tower(), experiment.bucket_cap_mb)
    with experiment.network(world_size):
        trace_steps(calling_from_python(model), experiment.inputs(), 3)


def trace_steps(model: nn.Module, inputs: torch.Tensor, steps: int) -> None:
    """Take steps, each in a span: inside are forward, backward and finish."""
    for step in range(steps):
        model.zero_grad()
        dist.barrier()
        with span(f"step {step}"):
            with span("forward"):
                loss = model(inputs).square().mean()
            with span("backward"):
                loss.backward()
            with span("finish"):
                finish_gradient_synchronization(model)


class Calls(NamedTuple):
    """The all_reduces of one rank: how many, how many of them begun in backward, bytes."""

    count: int
    during_backward: int
    nbytes: int


def count_calls(report: Report, during: str = "step 2") -> Calls:
    """The all_reduces of rank 0 inside its span of that name."""
    mine = [event for event in events_of(report, during) if event.rank == 0]
    sent = [event for event in mine if event.op == "all_reduce"]
    spans = [event for event in mine if event.note == "backward"]
    early = [s for s in sent if any(b.begin < s.begin < b.end for b in spans)]
    return Calls(len(sent), len(early), sum(event.nbytes for event in sent))


def time_steps(
    rank: int,
    world_size: int,
    wrappers: list[Wrapper],
    experiment: Experiment,
    steps: int = 3,
) -> dict[str, list[float]]:
    """The seconds of each step with each wrapper, in turns, after two that do not count."""
    models = {
        wrapper.__name__: wrap(wrapper, experiment.tower(), experiment.bucket_cap_mb)
        for wrapper in wrappers
    }
    if experiment.link is not None:
        models = {name: calling_from_python(model) for name, model in models.items()}
    inputs = experiment.inputs()
    times: dict[str, list[float]] = {name: [] for name in models}
    with experiment.network(world_size):
        for _ in range(2 + steps):
            for name, model in models.items():
                model.zero_grad()
                dist.barrier()
                begin = time.perf_counter()
                model(inputs).square().mean().backward()
                finish_gradient_synchronization(model)
                times[name].append(time.perf_counter() - begin)
    return {name: seconds[2:] for name, seconds in times.items()}


def time_bucket_caps(
    rank: int, world_size: int, caps: list[float], experiment: Experiment, steps: int = 2
) -> dict[float, float]:
    """The seconds of the shortest step of torch's DDP with each `bucket_cap_mb`, in MiB."""
    shortest = {}
    for cap in caps:
        setting = replace(experiment, bucket_cap_mb=cap)
        times = time_steps(rank, world_size, [DistributedDataParallel], setting, steps)
        (seconds,) = times.values()
        shortest[cap] = min(seconds)
    return shortest
