"""Apparatus, not the lesson: draws and counts steps, and makes the tables."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.ddp_buckets.experiments import (
    WRAPPERS,
    Setting,
    Tower,
    Wrapper,
    calling_from_python,
    finish_gradient_synchronization,
    train,
    train_replicas,
)
from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP
from mgpu_tutorial.lab import Table, frame, launch, span, timeline
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.intervals import events_of, milliseconds, shortest_step
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.shared.parameters import fingerprint


def record_steps(
    rank: int, world_size: int, wrapper: Wrapper, setting: Setting, **options: float | bool
) -> None:
    """The ranks take five steps, each in a span: inside are forward, backward and finish."""
    model = calling_from_python(wrapper(setting.tower(), **options))
    inputs = setting.inputs()
    with setting.network(world_size):
        for step in range(5):
            model.zero_grad()
            dist.barrier()
            with span(f"step {step}"):
                with span("forward"):
                    loss = model(inputs).square().mean()
                with span("backward"):
                    loss.backward()
                with span("finish"):
                    finish_gradient_synchronization(model)


def draw_step(
    wrapper: Wrapper, setting: Setting, like: Report | None = None, **options: float | bool
) -> tuple[Report, Plot]:
    """The run of five steps on two ranks, and the picture of one; the time axis of `like`."""
    run = shortest_step(launch(record_steps, 2, wrapper, setting, trace=True, **options))
    return run, timeline(run, like, during="shortest")


SAYS = [
    "Backward begins with the head. Its bucket is full at once, but it is the last and must "
    "not leave yet.",
    "The gradients of layer 3 are two of the four in bucket 0.",
    "Layer 2 fills bucket 0, and bucket 0 leaves. Backward goes on.",
    "While backward was in layer 1, the mean of bucket 0 has arrived.",
    "Layer 0 fills bucket 1, which leaves, and bucket 2 leaves behind it.",
    "Backward is over. Only the means that are still on their way have to be waited for.",
]


class Filmed(BucketedDDP):
    """Notes a frame after each layer, in which what the layer before sent has arrived."""

    def __init__(self, module: nn.Module, bucket_cap_mb: float) -> None:
        super().__init__(module, bucket_cap_mb)
        self.number = 0

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        sent = len(self.works)
        super().gradient_ready(parameter)
        for layer in self.module.modules():
            own = set(layer.parameters(recurse=False))
            if parameter in own and own <= self.ready:
                self.note_frame(sent)

    def note_frame(self, arrived: int) -> None:
        for work in self.works[:arrived]:
            work.wait()
        bricks = {}
        for i, bucket in enumerate(self.buckets):
            if i < arrived:
                bricks[f"bucket {i}"] = range(dist.get_world_size())
            elif i < len(self.works):
                bricks[f"bucket {i}"] = "sent"
            else:
                ready = len(self.ready & set(bucket))
                bricks[f"bucket {i}"] = f"{ready} of {len(bucket)}"
        frame(SAYS[self.number], bricks)
        self.number += 1


def fill_buckets(rank: int, world_size: int) -> None:
    """Two ranks go backward through four layers and a head, with two layers to a bucket."""
    layer = 64 * 64 * 4 / 2**20
    model = Filmed(Tower(64, depth=4), 2 * layer)
    model(torch.ones(2, 64)).sum().backward()
    model.note_frame(len(model.works))


def count_calls(report: Report, during: str = "step 2") -> tuple[int, int]:
    """The all_reduces of rank 0 inside its span of that name; how many begin in backward."""
    events = [event for event in events_of(report, during) if event.rank == 0]
    sent = [event for event in events if event.op == "all_reduce"]
    spans = [event for event in events if event.note == "backward"]
    return len(sent), sum(any(b.begin < s.begin < b.end for b in spans) for s in sent)


RUNS = [  # in the order of the page
    "NaiveDDP",
    "BucketedDDP, cap 0",
    "BucketedDDP, cap 25",
    "BucketedDDP, cap 0.25",
    "DistributedDataParallel",
]


def ends_of(runs: Sequence[Report]) -> list[float]:
    """The milliseconds of a step of each run."""
    return [milliseconds(run, "shortest") for run in runs]


def tabulate_ends(runs: Sequence[Report], computed: Sequence[int]) -> Table:
    """The calls of a step of each of RUNS, and its end in milliseconds."""
    calls = [count_calls(run, "shortest")[0] for run in runs]
    rows = [*zip(RUNS, calls, computed, map(round, ends_of(runs)), strict=True)]
    return Table(["", "calls", "computed, no forward (ms)", "measured (ms)"], rows)


def take_fingerprints(
    rank: int, world_size: int, wrapper: Wrapper, breaks: Sequence[Callable[..., None]]
) -> list[list[str]]:
    """This rank's fingerprints at the start and after each of four steps, broken each way."""
    return [
        [fingerprint(model) for model in train(rank, world_size, wrapper, 4, break_it=broken)]
        for broken in breaks
    ]


def tabulate_fingerprints(wrapper: Wrapper, breaks: Sequence[Callable[..., None]]) -> Table:
    """Three ranks train, broken in each way; a letter for each different fingerprint."""
    ranks = launch(take_fingerprints, 3, wrapper, breaks).results
    rows = []
    for broken, block in zip(breaks, zip(*ranks, strict=True), strict=True):
        column_by_column = [seen for column in zip(*block, strict=True) for seen in column]
        letter = {f: chr(65 + i) for i, f in enumerate(dict.fromkeys(column_by_column))}
        for rank, prints in enumerate(block):
            name = "" if rank else broken.__name__
            rows.append([name, f"rank {rank}", *(letter[f] for f in prints)])
    return Table(["broken", "", "start", "step 1", "step 2", "step 3", "step 4"], rows)


def tabulate_distances() -> Table:
    """How far ten steps with each of the WRAPPERS end from those of one process."""
    alone, rows = train_replicas(0, 1), []
    for wrapper, options in WRAPPERS.items():
        found = launch(train_replicas, 3, wrapper, **options).results
        distance = largest_difference(found, [alone] * 3)
        rows.append([wrapper.__name__, "below 1e-6" if distance < 1e-6 else distance])
    return Table(["3 ranks", "largest difference to 1 process"], rows)
