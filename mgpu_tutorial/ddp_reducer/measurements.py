"""Apparatus, not the lesson: counts and times what the hooks and the options do."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from mgpu_tutorial.collectives import ring_seconds
from mgpu_tutorial.ddp_buckets.experiments import Tower, run_each_setting, train_alone
from mgpu_tutorial.ddp_buckets.measurements import payload, shortest_step
from mgpu_tutorial.ddp_reducer.hooks import HOOKS, Hook, train_digits
from mgpu_tutorial.ddp_reducer.reducer import (
    Buckets,
    count_memory,
    observe_buckets,
    train_with_options,
)
from mgpu_tutorial.lab import Table, launch, slow_link
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.shared.cost_model import Link

FREE = Link(latency=0.0, bandwidth=float("inf"))  # nothing is added to this machine's own


def try_each(worker: Callable[..., Any], settings: Mapping[str, dict]) -> dict[str, Any]:
    """What rank 0 of two returns from `worker` with each of the named settings."""
    return launch(run_each_setting, 2, worker, dict(settings)).results[0]


def sizes_in_mib(iterations: list[Buckets], module: nn.Module) -> list[str]:
    """The sizes of the buckets of each iteration in words, such as "1.0 + 5.0"."""
    mib = {name: p.nbytes / 2**20 for name, p in module.named_parameters()}
    return [
        " + ".join(f"{sum(mib[name] for name in bucket):.1f}" for bucket in buckets)
        for buckets in iterations
    ]


def bucket_sizes(settings: Mapping[str, dict]) -> Table:
    """The sizes of the buckets of a 6 MiB Tower in three iterations, by named options."""
    wide = {name: {"width": 512} | options for name, options in settings.items()}
    tower = Tower(512, depth=6)
    rows = [
        [name, *sizes_in_mib(seen, tower)]
        for name, seen in try_each(observe_buckets, wide).items()
    ]
    return Table(["MiB", "iteration 1", "iteration 2", "iteration 3"], rows)


def outcome_of(options: dict[str, Any]) -> dict[str, Any]:
    """The buckets of the second iteration, and what the gradients take beside them."""
    held = try_each(count_memory, {"": options})[""]
    seen = try_each(observe_buckets, {"": {"width": 512} | options})[""]
    sizes = sizes_in_mib(seen, Tower(512, depth=6))[1]
    return {"buckets": sizes, "bytes beside them": held.get("gradients", 0)}


def apart_from_one_process(world_size: int, **options: Any) -> float:
    """How far any parameter of any rank ends from one process's in `train_with_options`."""
    _, alone = train_alone(steps=10)
    ranks = launch(train_with_options, world_size, **options).results
    pairs = [pair for found in ranks for pair in zip(found, alone, strict=True)]
    return max(float((p - q).abs().max()) for p, q in pairs)


def distance_moved() -> float:
    """How far the parameter that moves most does so in `train_with_options`, alone."""
    torch.manual_seed(0)
    start = Tower()
    _, alone = train_alone(steps=10)
    pairs = zip(start.parameters(), alone, strict=True)
    return max(float((p.detach() - q).abs().max()) for p, q in pairs)


def train_with_each(hooks: list[str]) -> dict[str, Report]:
    """The traces of `train_digits` on two ranks with each of the HOOKS named."""
    return {name: launch(train_digits, 2, name, trace=True) for name in hooks}


def bytes_of_last_step(report: Report) -> int:
    """The bytes that rank 0 handed over in the last step of `train_digits`."""
    return payload(report, f"step {len(report.results[0]) - 1}")


def mean_losses(report: Report) -> list[float]:
    """The loss of each global batch in `train_digits`: the mean over the ranks."""
    return [sum(losses) / len(losses) for losses in zip(*report.results, strict=True)]


def average_with(rank: int, world_size: int, hook: Hook) -> float:
    """The ranks average their gradients 1, 2, … with a hook that needs no state."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model.register_comm_hook(None, hook)
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    return model.module.weight.grad.item()


def calmest_step(worker: Callable[..., Any], **options: Any) -> Report:
    """The trace of `worker` on two ranks; the shortest step from the third is "shortest"."""
    return shortest_step(launch(worker, 2, trace=True, **options))


def step_milliseconds(report: Report, step: str = "shortest") -> float:
    """How long rank 0's span of that name took."""
    (span,) = [e for e in report.events if e.note == step and e.rank == 0]
    return 1e3 * (span.end - span.begin)


def time_each_hook(
    rank: int, world_size: int, hooks: list[str], link: Link = FREE, steps: int = 12
) -> dict[str, float]:
    """The milliseconds of the shortest step of a 6 MiB Tower with each of the HOOKS named.

    They take turns, and every all_reduce takes as long as a ring over `link` besides.
    """
    models = {
        name: DistributedDataParallel(Tower(512, depth=6), bucket_cap_mb=25) for name in hooks
    }
    for name, model in models.items():
        HOOKS[name](model)
    inputs = torch.randn(4, 512)
    times: dict[str, list[float]] = {name: [] for name in hooks}
    with slow_link(lambda nbytes: ring_seconds(nbytes, world_size, *link)):
        for _ in range(3 + steps):  # PowerSGD begins with the third
            for name, model in models.items():
                model.zero_grad()
                dist.barrier()
                begin = time.perf_counter()
                model(inputs).square().mean().backward()
                times[name].append(time.perf_counter() - begin)
    return {name: 1e3 * min(taken[3:]) for name, taken in times.items()}


def profile_search(
    rank: int, world_size: int, depth: int, **options: Any
) -> tuple[int, float]:
    """What a profiler sees in one step of DDP(Tower(64, depth), **options).

    How often gloo's all_reduce ran, and how many microseconds DDP searched the graph.
    """
    model = DistributedDataParallel(Tower(64, depth), **options)
    inputs = torch.randn(4, 64)
    for _ in range(3):
        model.zero_grad()
        model(inputs).square().mean().backward()
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        model(inputs).square().mean().backward()
    found = {event.key: event for event in seen.key_averages()}
    search = found.get("torch.distributed.ddp.reducer::search_unused_parameters")
    return found["gloo:all_reduce"].count, search.cpu_time_total if search else 0.0
