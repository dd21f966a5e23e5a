"""Apparatus, not the lesson: runs and counts steps on a slow link, and makes the tables."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets import experiments
from mgpu_tutorial.ddp_buckets.experiments import Tower
from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP, into_buckets
from mgpu_tutorial.lab import Table, frame, launch, span
from mgpu_tutorial.lab.record.intervals import events_of, milliseconds, shortest_step
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.shared.cost_model.links import Link, ring_seconds
from mgpu_tutorial.shared.parameters import fingerprint
from mgpu_tutorial.shared.slow_link import slow_link


def record_steps(
    rank: int,
    world_size: int,
    wrapper: type[nn.Module],
    link: Link,
    tower: type[Tower] = Tower,
    **options: float | bool,
) -> None:
    """Five steps on 8 samples, in spans: six layers of width 256, each 20 ms in backward."""
    module = tower(256, 6)
    for layer in module.body:
        layer.register_full_backward_pre_hook(lambda layer, gradient: time.sleep(0.02))
    model = wrapper(module, **options)
    if wrapper is DistributedDataParallel:  # its calls from C++ are not seen, nor slowed
        model.register_comm_hook(None, allreduce_hook)
    inputs = torch.randn(8, 256)
    with slow_link(lambda nbytes: ring_seconds(nbytes, world_size, link)):
        for step in range(5):
            model.zero_grad()
            dist.barrier()
            with span(f"step {step}"):
                with span("forward"):
                    loss = model(inputs).square().mean()
                with span("backward"):
                    loss.backward()
                with span("finish"):
                    experiments.finish_gradient_synchronization(model)


def run_steps(wrapper: type[nn.Module], link: Link, **options) -> Report:
    """Five steps on two ranks; the shortest of the last three is called "shortest"."""
    return shortest_step(launch(record_steps, 2, wrapper, link, trace=True, **options))


def count_calls(report: Report, during: str = "shortest") -> tuple[int, int]:
    """The all_reduces of rank 0 inside its span of that name; how many begin in backward."""
    events = [event for event in events_of(report, during) if event.rank == 0]
    sent = [event for event in events if event.op == "all_reduce"]
    spans = [event for event in events if event.note == "backward"]
    return len(sent), sum(any(b.begin < s.begin < b.end for b in spans) for s in sent)


def tabulate_ends(runs: Mapping[str, Report], computed: Sequence[int]) -> Table:
    """The calls of a step of each run, and its computed and measured end in milliseconds."""
    rows = [
        [name, count_calls(run)[0], end, round(milliseconds(run, "shortest"))]
        for (name, run), end in zip(runs.items(), computed, strict=True)
    ]
    return Table(["", "calls", "computed, no forward (ms)", "measured (ms)"], rows)


SAYS = [
    "Backward begins with the head. Its bucket is full at once, but it is the last and must "
    "not leave yet.",
    "The gradients of layer 3 are two of the four in bucket 0.",
    "Layer 2 fills bucket 0, and bucket 0 leaves. Backward goes on.",
    "Backward is through with layer 1, while bucket 0 is on its way.",
    "Layer 0 fills bucket 1, which leaves, and bucket 2 leaves behind it.",
    "All means have arrived, and the step is over.",
]


def fill_buckets(
    rank: int, world_size: int, wrapper: Callable[..., nn.Module] = BucketedDDP
) -> None:
    """Two ranks go backward through four layers and a head, with two layers to a bucket."""
    cap, says, tower = 2 * 64 * 64 * 4 / 2**20, iter(SAYS), Tower(64, depth=4)
    model, call, sent = wrapper(tower, cap), dist.all_reduce, []

    def counted(*given: Any, **options: Any) -> dist.Work | None:
        sent.append(given)
        return call(*given, **options)

    def note_frame(*_: object) -> None:
        bricks = {}
        for i, bucket in enumerate(into_buckets(list(tower.parameters()), cap)):
            ready = f"{sum(p.grad is not None for p in bucket)} of {len(bucket)}"
            bricks[f"bucket {i}"] = "sent" if i < len(sent) else ready
        frame(next(says), bricks)

    for layer in tower.body:  # those behind it are ready
        layer.register_full_backward_pre_hook(note_frame)
    dist.all_reduce = counted
    try:
        model(torch.ones(2, 64)).sum().backward()
        note_frame()
        model.finish_gradient_synchronization()
    finally:
        dist.all_reduce = call
    arrived = range(world_size)
    frame(next(says), {f"bucket {i}": arrived for i in range(len(sent))})


def take_fingerprints(
    rank: int, world_size: int, wrapper: type[nn.Module], break_it: Callable
) -> list[str]:
    """This rank's fingerprints at the start and after each of four steps."""
    steps = experiments.train(rank, world_size, wrapper, 4, break_it)
    return [fingerprint(model) for model in steps]


def tabulate_fingerprints(wrapper: type[nn.Module], breaks: Sequence[Callable]) -> Table:
    """Three ranks train, broken in each way; a letter for each different fingerprint."""
    rows = []
    for broken in breaks:
        ranks = launch(take_fingerprints, 3, wrapper, broken).results
        in_order = [seen for column in zip(*ranks, strict=True) for seen in column]
        letter = {f: chr(65 + i) for i, f in enumerate(dict.fromkeys(in_order))}
        for rank, prints in enumerate(ranks):
            name = "" if rank else broken.__name__
            rows.append([name, f"rank {rank}", *(letter[f] for f in prints)])
    return Table(["broken", "", "start", "step 1", "step 2", "step 3", "step 4"], rows)
