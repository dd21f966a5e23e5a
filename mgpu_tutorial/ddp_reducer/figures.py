"""Apparatus, not the lesson: counts, times and draws what the hooks and the options do."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.ddp_buckets.experiments import Tower, run_each_setting, train_alone
from mgpu_tutorial.ddp_reducer.hooks import train_digits
from mgpu_tutorial.ddp_reducer.reducer import (
    Buckets,
    count_memory,
    observe_buckets,
    train_with_options,
)
from mgpu_tutorial.lab import Table, curves, frame, launch
from mgpu_tutorial.lab.draw.drawing import INK, Drawing
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.words import bytes_text

CELL, HEIGHT, ROW, TOP, GAP, BORDER = 54, 40, 84, 12, 10, 3  # pixels


def try_each(worker: Callable[..., Any], settings: Mapping[str, dict]) -> dict[str, Any]:
    """Launch `worker` on two ranks with each of the settings; returns rank 0's results."""
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
    nbytes = try_each(count_memory, {"": options})[""]
    seen = try_each(observe_buckets, {"": {"width": 512} | options})[""]
    sizes = sizes_in_mib(seen, Tower(512, depth=6))[1]
    return {"buckets": sizes, "bytes beside them": nbytes.get("gradients", 0)}


def apart_from_one_process(world_size: int, **options: Any) -> float:
    """Largest difference of any rank's parameters to one process in `train_with_options`."""
    _, alone = train_alone(steps=10)
    ranks = launch(train_with_options, world_size, **options).results
    return largest_difference(ranks, [alone] * world_size)


def distance_moved() -> float:
    """Largest change of a parameter in the steps of `train_with_options`, in one process."""
    torch.manual_seed(0)
    start = list(Tower().parameters())
    _, alone = train_alone(steps=10)
    return largest_difference(alone, start)


def train_with_each(hooks: list[str]) -> dict[str, Report]:
    """The traces of `train_digits` on two ranks with each of the HOOKS named."""
    return {name: launch(train_digits, 2, name, trace=True) for name in hooks}


def mean_losses(report: Report) -> list[float]:
    """The loss of each global batch in `train_digits`: the mean over the ranks."""
    return [sum(losses) / len(losses) for losses in zip(*report.results, strict=True)]


def loss_curves(trained: Mapping[str, Report]) -> Plot:
    """The loss of each step of `train_digits` by the hook's name."""
    losses = {name: mean_losses(report) for name, report in trained.items()}
    measured = {name: (range(len(values)), values) for name, values in losses.items()}
    return curves(measured, {}, "step", "loss", scale="linear")


def last_losses(trained: Mapping[str, Report]) -> dict[str, float]:
    """The mean loss of the last six steps by the hook's name."""
    return {name: sum(mean_losses(report)[-6:]) / 6 for name, report in trained.items()}


# The first two iterations as a film


def follow_buckets(rank: int, world_size: int, seen: list[Buckets]) -> None:
    """Fill the buckets that `note_buckets` saw, two layers at a time, with a frame each."""
    thirds = [["head", "body.5", "body.4"], ["body.3", "body.2"], ["body.1", "body.0"]]
    for iteration, buckets in enumerate(seen[:2], 1):
        ready, sent = [], 0
        count = "one bucket" if len(buckets) == 1 else f"{len(buckets)} buckets"
        _note_frame(f"Iteration {iteration} begins, with {count}.", buckets, ready, sent)
        for layers in thirds:
            ready += [name for name in sum(buckets, []) if name.rpartition(".")[0] in layers]
            before = sent
            while sent < len(buckets) and set(buckets[sent]) <= set(ready):
                dist.all_reduce(torch.zeros(1))
                sent += 1
            leaves = f"bucket {sent - 1} leaves" if sent > before else "nothing leaves"
            says = f"Iteration {iteration}: after {' and '.join(layers)} {leaves}."
            _note_frame(says, buckets, ready, sent)


def _note_frame(says: str, buckets: Buckets, ready: Sequence[str], sent: int) -> None:
    bricks = {}
    for i, bucket in enumerate(buckets):
        full = f"{len(set(bucket) & set(ready))} of {len(bucket)}"
        bricks[f"bucket {i}"] = "sent" if i < sent else full
    frame(says, bricks)


# Which parameter travels in which bucket: a row per iteration, a box per bucket


def bucket_map(
    rows: Mapping[str, Sequence[Sequence[str]]], nbytes: Mapping[str, int]
) -> Drawing:
    """Draw, for each named row, its buckets in the order in which they are sent.

    A row is a list of buckets, a bucket a list of parameter names, and `nbytes` the bytes of
    each parameter. Large parameters (weights) are dark, small ones (biases) light.
    """
    left = 20 + 7.5 * max(map(len, rows))
    widest = max(sum(_width(bucket) + GAP for bucket in buckets) for buckets in rows.values())
    text = "\n".join(_as_text(rows, nbytes))
    alt = "Which parameter is in which bucket"
    drawing = Drawing(left + widest + 8, TOP + ROW * len(rows), text, alt)
    for i, (name, buckets) in enumerate(rows.items()):
        y = TOP + ROW * i
        drawing.label(10, y + 46, name, 13, anchor="start", weight="bold")
        x = left
        for number, bucket in enumerate(buckets):
            total = bytes_text(sum(nbytes[parameter] for parameter in bucket))
            title = f"bucket {number}, {total}" if len(bucket) > 2 else f"{number}: {total}"
            drawing.label(x + _width(bucket) / 2, y + 13, title, 13, weight="bold")
            drawing.box(x, y + 19, _width(bucket), HEIGHT + 8, INK, "#ffffff", 2)
            _draw_parameters(drawing, x + BORDER + 1, y + 23, bucket, nbytes)
            x += _width(bucket) + GAP
    return drawing


def _width(bucket: Sequence[str]) -> int:
    return CELL * len(bucket) + 2 * BORDER


def _draw_parameters(
    drawing: Drawing,
    left: float,
    top: float,
    bucket: Sequence[str],
    nbytes: Mapping[str, int],
) -> None:
    large = max(nbytes.values()) / 8
    for i, name in enumerate(bucket):
        fill, ink = ("#5b5b5b", "#ffffff") if nbytes[name] >= large else ("#e4e4e4", INK)
        x = left + CELL * i
        drawing.box(x, top, CELL - 2, HEIGHT, fill, fill, 1, radius=3)
        layer, _, kind = name.rpartition(".")
        drawing.label(x + CELL / 2 - 1, top + 16, layer or kind, 14, ink)
        drawing.label(x + CELL / 2 - 1, top + 31, kind if layer else "", 14, ink)


def _as_text(
    rows: Mapping[str, Sequence[Sequence[str]]], nbytes: Mapping[str, int]
) -> list[str]:
    lines = []
    for name, buckets in rows.items():
        for number, bucket in enumerate(buckets):
            total = bytes_text(sum(nbytes[parameter] for parameter in bucket))
            lines.append(f"{name}, bucket {number} ({total}): {', '.join(bucket)}")
    return lines
