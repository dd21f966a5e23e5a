"""Apparatus, not the lesson: draws and counts steps, and makes the tables."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.ddp_buckets.experiments import (
    WRAPPERS,
    Setting,
    Tower,
    Wrapper,
    calling_from_python,
    follow_one_step,
    run_each_setting,
    take_fingerprints,
    trace_steps,
    train_alone,
    train_replicas,
    wrap,
)
from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP
from mgpu_tutorial.lab import Table, frame, launch, timeline
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.intervals import events_of, milliseconds, shortest_step
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.shared.cost_model.links import ring_seconds


def record_steps(
    rank: int,
    world_size: int,
    wrapper: Wrapper,
    setting: Setting,
    bucket_cap_mb: float | None = None,
) -> None:
    """The ranks take five steps in one of the WRAPPERS, such that each can be drawn."""
    model = wrap(wrapper, setting.tower(), bucket_cap_mb)
    with setting.network(world_size):
        trace_steps(calling_from_python(model), setting.inputs(), 5)


def draw_step(
    wrapper: Wrapper,
    setting: Setting,
    bucket_cap_mb: float | None = None,
    like: Report | None = None,
) -> tuple[Report, Plot]:
    """The run of five steps on two ranks, and the picture of one; the time axis of `like`."""
    report = launch(record_steps, 2, wrapper, setting, bucket_cap_mb, trace=True)
    run = shortest_step(report)
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


class Calls(NamedTuple):
    """The all_reduces of one rank: how many, how many of them begun in backward, bytes."""

    count: int
    during_backward: int
    nbytes: int


def count_calls(report: Report, during: str = "step 2") -> Calls:
    """The all_reduces of rank 0 inside its span of that name."""
    events = [event for event in events_of(report, during) if event.rank == 0]
    sent = [event for event in events if event.op == "all_reduce"]
    spans = [event for event in events if event.note == "backward"]
    early = [s for s in sent if any(b.begin < s.begin < b.end for b in spans)]
    return Calls(len(sent), len(early), sum(event.nbytes for event in sent))


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


def tabulate_ends(runs: Sequence[Report], setting: Setting) -> Table:
    """The calls of a step of each of RUNS, and its end: by the model, and measured."""
    calls = [count_calls(run, "shortest").count for run in runs]
    computed, measured = computed_milliseconds(setting), ends_of(runs)
    rows = [*zip(RUNS, calls, map(round, computed), map(round, measured), strict=True)]
    return Table(["", "calls", "computed, no forward (ms)", "measured (ms)"], rows)


def computed_milliseconds(setting: Setting, ranks: int = 2) -> list[float]:
    """The end of a step by the model of the link, for each of RUNS.

    Ours sends the head last, torch's in its first bucket.
    Backward only pauses; a call begins when its gradients are ready and the link is free.
    """
    tower = setting.tower()
    head, *body = [
        [p.nbytes for p in layer.parameters()] for layer in (tower.head, *tower.body)
    ]
    backward = setting.pause * setting.depth
    ready = [setting.pause * (i + 1) for i in range(setting.depth)]  # the last layer first
    sizes = [*map(sum, body)]

    naive = [(backward, nbytes) for nbytes in sum(body, head)]
    alone = zip([*ready, backward], [*body, head], strict=True)
    early = [(moment, nbytes) for moment, layer in alone for nbytes in layer]
    one_bucket = [(backward, sum(head) + sum(sizes))]
    bucketed = [*zip(ready, sizes, strict=True), (backward, sum(head))]
    head_first = [*zip(ready, [sum(head) + sizes[0], *sizes[1:]], strict=True)]

    ends = []
    for calls in (naive, early, one_bucket, bucketed, head_first):
        end = 0.0
        for moment, nbytes in calls:
            end = max(end, moment) + ring_seconds(nbytes, ranks, setting.link)
        ends.append(1e3 * end)
    return ends


def tabulate_one_step() -> Table:
    """The single weight of two ranks, and its gradient, at each moment of a step."""
    first, second = launch(follow_one_step, 2).results
    rows = [[moment, first[moment], second[moment]] for moment in first]
    return Table(["the weight, or its gradient", "rank 0", "rank 1"], rows)


def tabulate_fingerprints(wrapper: Wrapper, breaks: Sequence[Callable[..., None]]) -> Table:
    """Three ranks train, broken in each way; a letter for each different fingerprint."""
    settings = {b.__name__: {"wrapper": wrapper, "break_it": b} for b in breaks}
    ranks = launch(run_each_setting, 3, take_fingerprints, settings).results
    rows = []
    for name in settings:
        letters = name_by_letters([prints[name] for prints in ranks])
        blocks = [name] + [""] * (len(ranks) - 1)
        rows += [[block, f"rank {r}", *letters[r]] for r, block in enumerate(blocks)]
    return Table(["broken", "", "start", "step 1", "step 2", "step 3", "step 4"], rows)


def name_by_letters(rows: list[list[str]]) -> list[list[str]]:
    """A letter for each different fingerprint, in order of appearance, column by column."""
    columns = list(zip(*rows, strict=True))
    letter = {f: chr(65 + i) for i, f in enumerate(dict.fromkeys(sum(columns, ())))}
    return [[letter[f] for f in row] for row in rows]


def tabulate_distances(ranks: int = 3) -> Table:
    """How far ten steps with each of the WRAPPERS end from those of one process."""
    settings = {wrapper.__name__: {"wrapper": wrapper} for wrapper in WRAPPERS}
    results = launch(run_each_setting, ranks, train_replicas, settings).results
    alone = [train_alone()] * ranks
    rows = []
    for name in settings:
        distance = largest_difference([found[name] for found in results], alone)
        rows.append([name, "below 1e-6" if distance < 1e-6 else distance])
    return Table([f"{ranks} ranks", "largest difference to 1 process"], rows)
