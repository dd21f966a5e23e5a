"""Apparatus, not the lesson: records, counts and times the steps of any wrapper and hook."""

import time
from dataclasses import replace
from typing import NamedTuple

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.experiments import (
    Setting,
    Trained,
    name_by_letters,
    trace_steps,
)
from mgpu_tutorial.ddp_buckets.wrappers import (
    Wrapper,
    calling_from_python,
    finish_gradient_synchronization,
    wrap,
)
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report


def record_steps(rank: int, world_size: int, wrapper: Wrapper, setting: Setting) -> None:
    """The ranks take five steps in one of the WRAPPERS, such that each can be drawn."""
    model = wrap(wrapper, setting.tower(), setting.bucket_cap_mb)
    with setting.network(world_size):
        trace_steps(calling_from_python(model), setting.inputs(), 5)


def milliseconds(report: Report, name: str) -> float:
    """How long the span of that name took on the slower rank."""
    spans = [e for e in report.events if e.kind == "span" and e.note == name]
    return 1e3 * max(span.end - span.begin for span in spans)


def shortest_step(report: Report) -> Report:
    """The same run; its shortest step, of all but the first two, is called "shortest"."""
    notes = [e.note for e in report.events if e.kind == "span"]
    steps = sorted({note for note in notes if note.startswith("step ")})
    found = min(steps[2:], key=lambda step: milliseconds(report, step))
    events = [replace(e, note="shortest") if e.note == found else e for e in report.events]
    return replace(report, events=events)


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


def rows_of_letters(ranks: list[dict[str, list[str]]]) -> list[list[str]]:
    """A row for each break and rank: which of the rank's fingerprints are the others' too."""
    rows = []
    for broken in ranks[0]:
        letters = name_by_letters([prints[broken] for prints in ranks])
        names = [f"rank {rank}" for rank in range(len(ranks))]
        blocks = [broken] + [""] * (len(ranks) - 1)
        pairs = zip(blocks, names, letters, strict=True)
        rows += [[block, name, *row] for block, name, row in pairs]
    return rows


def distance(trained: list[Trained], alone: Trained) -> float:
    """The largest difference of any rank's gradients or parameters to one process's."""
    expected = [*alone[0], *alone[1]]
    differences = [
        (mine - theirs).abs().max().item()
        for gradients, parameters in trained
        for mine, theirs in zip([*gradients, *parameters], expected, strict=True)
    ]
    return max(differences)


def payload(report: Report, name: str, rank: int = 0) -> int:
    """The bytes that one rank handed to collectives inside its span `name`."""
    mine = [event for event in report.events if event.rank == rank]
    (inside,) = [e for e in mine if e.kind == "span" and e.note == name]
    return sum(
        e.nbytes
        for e in mine
        if e.kind == "collective" and inside.begin <= e.begin <= inside.end
    )
