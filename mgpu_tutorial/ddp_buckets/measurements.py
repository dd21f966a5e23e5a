"""Apparatus, not the lesson: records, counts and times the steps of any wrapper and hook."""

import time
from dataclasses import replace
from typing import NamedTuple

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.experiments import Setting, trace_steps
from mgpu_tutorial.ddp_buckets.wrappers import (
    Wrapper,
    calling_from_python,
    finish_gradient_synchronization,
    wrap,
)
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report


def record_steps(rank: int, world_size: int, wrapper: Wrapper, setting: Setting) -> None:
    """The ranks take three steps in one of the WRAPPERS, such that each can be drawn."""
    model = wrap(wrapper, setting.tower(), setting.bucket_cap_mb)
    with setting.network(world_size):
        trace_steps(calling_from_python(model), setting.inputs(), 3)


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
    rank: int, world_size: int, wrappers: list[Wrapper], setting: Setting, steps: int = 3
) -> dict[str, list[float]]:
    """The seconds of each step with each wrapper, in turns, after two that do not count."""
    models = {
        wrapper.__name__: wrap(wrapper, setting.tower(), setting.bucket_cap_mb)
        for wrapper in wrappers
    }
    if setting.link is not None:
        models = {name: calling_from_python(model) for name, model in models.items()}
    inputs = setting.inputs()
    times: dict[str, list[float]] = {name: [] for name in models}
    with setting.network(world_size):
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
    rank: int, world_size: int, caps: list[float], setting: Setting, steps: int = 2
) -> dict[float, float]:
    """The seconds of the shortest step of torch's DDP with each `bucket_cap_mb`, in MiB."""
    shortest = {}
    for cap in caps:
        given = replace(setting, bucket_cap_mb=cap)
        times = time_steps(rank, world_size, [DistributedDataParallel], given, steps)
        (seconds,) = times.values()
        shortest[cap] = min(seconds)
    return shortest


def mean_losses(report: Report) -> dict[str, list[float]]:
    """The loss of each global batch in `train_with_each_hook`: the mean over the ranks."""
    means = {}
    for hook in report.results[0]:
        by_rank = [result[hook] for result in report.results]
        means[hook] = [sum(step) / len(step) for step in zip(*by_rank, strict=True)]
    return means


def payload(report: Report, name: str, rank: int = 0) -> int:
    """The bytes that one rank handed to collectives inside its span `name`."""
    mine = [event for event in report.events if event.rank == rank]
    (inside,) = [e for e in mine if e.kind == "span" and e.note == name]
    return sum(
        e.nbytes
        for e in mine
        if e.kind == "collective" and inside.begin <= e.begin <= inside.end
    )
