"""Apparatus, not the lesson: draws, counts and times steps, and judges an exercise."""

import copy
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.experiments import Setting, Tower, shares, trace_steps
from mgpu_tutorial.ddp_buckets.wrappers import (
    BucketedDDP,
    Wrapper,
    calling_from_python,
    finish_gradient_synchronization,
    wrap,
)
from mgpu_tutorial.lab import launch, span
from mgpu_tutorial.lab.measure import in_turns
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.shared.cost_model.links import ring_seconds


def record_steps(rank: int, world_size: int, wrapper: Wrapper, setting: Setting) -> None:
    """The ranks take five steps in one of the WRAPPERS, such that each can be drawn."""
    model = wrap(wrapper, setting.tower(), setting.bucket_cap_mb)
    with setting.network(world_size):
        trace_steps(calling_from_python(model), setting.inputs(), 5)


def computed_milliseconds(setting: Setting, ranks: int = 2) -> list[float]:
    """The end of a step with each of WRAPPERS, by the model of the link; a bucket per layer.

    Backward only pauses; a call begins when its gradients are ready and the link is free.
    """
    tower = setting.tower()
    layers = [[p.nbytes for p in layer.parameters()] for layer in (tower.head, *tower.body)]
    head, *body = layers
    everything = sum(layers, [])
    backward = setting.pause * setting.depth
    ready = [setting.pause * (i + 1) for i in range(setting.depth)]  # the last layer first

    naive = [(backward, nbytes) for nbytes in everything]
    flat = [(backward, sum(everything))]
    overlapped = [(0.0, nbytes) for nbytes in head]
    overlapped += [(ready[i], nbytes) for i, layer in enumerate(body) for nbytes in layer]
    sizes = [sum(head) + sum(body[0]), *map(sum, body[1:])]  # the head with the first layer
    bucketed = list(zip(ready, sizes, strict=True))

    ends = []
    for calls in (naive, flat, overlapped, bucketed, bucketed):
        end = 0.0
        for moment, nbytes in calls:
            end = max(end, moment) + ring_seconds(nbytes, ranks, setting.link)
        ends.append(1e3 * end)
    return ends


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


def time_steps(
    rank: int, world_size: int, wrappers: list[Wrapper], setting: Setting, steps: int = 3
) -> dict[str, list[float]]:
    """The seconds of each step with each wrapper, in turns, after two that do not count."""
    inputs = setting.inputs()

    def step(model: nn.Module) -> None:
        model.zero_grad()
        model(inputs).square().mean().backward()
        finish_gradient_synchronization(model)

    actions = {}
    for wrapper in wrappers:
        model = wrap(wrapper, setting.tower(), setting.bucket_cap_mb)
        if setting.link is not None:
            model = calling_from_python(model)
        actions[wrapper.__name__] = partial(step, model)
    with setting.network(world_size):
        return in_turns(actions, steps, warm_up=2)


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


def name_by_letters(rows: list[list[str]]) -> list[list[str]]:
    """A letter for each different fingerprint, in order of appearance, column by column."""
    columns = list(zip(*rows, strict=True))
    letter = {f: chr(65 + i) for i, f in enumerate(dict.fromkeys(sum(columns, ())))}
    return [[letter[f] for f in row] for row in rows]


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


# An exercise: a wrapper with a planted bug, and its judge


class PlantedDDP(BucketedDDP):
    """BucketedDDP with a bug: some modules get gradients that are not the mean."""

    def _attach(self) -> None:
        for _, parameter in self.module.named_parameters(remove_duplicate=False):
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter: nn.Parameter) -> None:
        bucket = self.bucket_of[parameter]
        if self.synchronises and bucket.missing:
            bucket.missing.pop()  # one gradient less to wait for
            self.order.append(parameter)
            self._send_complete()


def average_tied_gradients(rank: int, world_size: int, wrapper: Wrapper) -> bool:
    """The ranks average the gradients of a Tower whose last two layers share their weight.

    Returns whether they are those of one process. What was sent has arrived before the
    last gradient of backward is added, as on a fast network.
    """
    torch.manual_seed(0)
    tower = Tower()
    tower.body[3].weight = tower.body[2].weight
    alone = copy.deepcopy(tower)
    model = wrap(wrapper, tower, bucket_cap_mb=0.03)

    def wait_for_what_was_sent(gradient: torch.Tensor) -> None:
        for bucket in getattr(model, "buckets", []):
            if bucket.work:
                bucket.work.wait()

    tower.body[0].weight.register_hook(wait_for_what_was_sent)
    pairs = zip(shares(rank, world_size, 2, width=64), shares(0, 1, 2, width=64), strict=True)
    for step, (share, whole) in enumerate(pairs):
        model.zero_grad()
        alone.zero_grad()
        with span(f"step {step}"):
            loss = model(share).square().mean()
            with span("backward"):
                loss.backward()
            finish_gradient_synchronization(model)
        alone(whole).square().mean().backward()
    pairs = zip(tower.parameters(), alone.parameters(), strict=True)
    return all(torch.allclose(p.grad, q.grad, atol=1e-7) for p, q in pairs)


def outcome_with_tied_weights(wrapper: Wrapper) -> dict[str, object]:
    """Launch `average_tied_gradients` on two ranks; count the buckets sent in backward."""
    report = launch(average_tied_gradients, 2, wrapper, trace=True)
    calls = count_calls(report, "step 1")
    return {
        "mean gradients": all(report.results),
        "buckets sent during backward": f"{calls.during_backward} of {calls.count}",
    }
