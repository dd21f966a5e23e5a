"""Apparatus: processor seconds by parts, and the stored comparison as tables.

`benchmarks/comparison.py` measured it and wrote comparison.json beside this file. There a
row is one setup, with the seconds of 20 iterations of the slowest rank, the bytes that each
device held, and the number of processes. A row that needs more GPUs than the machine has is
left out. Under "parts" a row is the processor seconds of forward, backward, update.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from mgpu_tutorial.comparison.estimates import StepCost, seconds_at_least
from mgpu_tutorial.comparison.training import (
    Experiment,
    Setup,
    SetupResult,
    devices_of,
    new_network,
    wrap,
)
from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.words import bytes_text

STORED = Path(__file__).with_name("comparison.json")
FORWARD = {"facecolor": "#a9c9e8", "edgecolor": INK, "linewidth": 0.6}
BACKWARD = {**FORWARD, "facecolor": "#f2b36b", "hatch": "////"}
NUMBER = {"facecolor": "white", "linewidth": 0, "pad": 1.2}


class Parts(NamedTuple):
    """Processor seconds of one step: forward with its loss, backward, and update.

    They count what all threads of one process have computed. A clock on the wall also
    counts waiting, and what else the machine does meanwhile.
    """

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
    devices = devices_of(setup, 2)
    module, optimizer, _ = new_network(experiment.network, 1, devices[0])
    model = wrap(module, setup, devices)
    count = experiment.batch // world_size
    images = torch.rand(count, 3, experiment.side, experiment.side, device=devices[0])
    labels = torch.arange(count, device=devices[0]) % 10
    steps = []
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
        steps.append(Parts(forward - begin, backward - forward, end - backward))
    return Parts(*map(min, zip(*steps[1:], strict=True)))


def load_stored(kind: str = "cpu") -> dict[str, Any] | None:
    """What is stored for "cpu", "cuda" or "parts"; None where that was never measured."""
    return json.loads(STORED.read_text(encoding="utf-8")).get(kind)


def summarise(ranks: Sequence[SetupResult]) -> dict[str, Any]:
    """One row: 20 times the median iteration of the slowest rank; every device's bytes."""
    slowest = map(max, zip(*(rank.seconds for rank in ranks), strict=True))
    return {
        "seconds": round(20 * statistics.median(slowest), 2),
        "memory": [device for rank in ranks for device in rank.memory],
        "peaks": [peak for rank in ranks for peak in rank.peaks],
        "processes": len({rank.pid for rank in ranks}),
    }


def table(result: dict[str, Any], network: str) -> Table:
    """A row per setup: seconds, speed against one device, memory per device, processes."""
    header = ["setup", "s per 20 iterations", "speed", "memory per device", "processes"]
    rows = []
    first = result["rows"][network]["one device"]["seconds"]
    for name, row in result["rows"][network].items():
        counted = [sum(device.values()) for device in row["memory"]]
        memory = ", ".join(bytes_text(n) for n in row["peaks"] or counted)
        seconds, speed = f"{row['seconds']:.1f}", f"{first / row['seconds']:.2f}"
        rows.append([name, seconds, speed, memory, row["processes"]])
    return Table(header, rows)


def parts_picture(result: dict[str, Any]) -> Plot:
    """Processor seconds of forward and backward, and the step as a share of one device's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6), layout="constrained")
    panels = figure.subplots(1, len(result["rows"]), sharey=True, squeeze=False)[0]
    lines = []
    for axes, (network, rows) in zip(panels, result["rows"].items(), strict=True):
        forward, backward, _ = zip(*rows.values(), strict=True)
        shares = [f"{sum(parts) / sum(rows['one device']):.2f}" for parts in rows.values()]
        first = axes.barh(list(rows), forward, 0.72, label="forward", **FORWARD)
        rest = axes.barh(list(rows), backward, 0.72, forward, label="backward", **BACKWARD)
        for bars in (first, rest):
            axes.bar_label(bars, fmt="%.1f", label_type="center", bbox=NUMBER)
        axes.bar_label(rest, shares, padding=6, fontsize=11, fontweight="bold")
        axes.set_title(network, loc="left", fontweight="bold")
        axes.margins(x=0.25)
        axes.tick_params(bottom=False, left=False, labelbottom=False, labelsize=11)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        for name, f, b, share in zip(rows, forward, backward, shares, strict=True):
            lines.append(f"{network}, {name}: {f:.2f} + {b:.2f} s, {share}")
    axes.invert_yaxis()
    look = {"loc": "outside upper right", "ncols": 2, "frameon": False}
    figure.legend(*axes.get_legend_handles_labels(), **look)
    return Plot(figure, "\n".join(lines))


def bounds_table(
    steps: Mapping[str, StepCost],
    gpus: int,
    formats: Mapping[str, tuple[float, float]],
    memory: float,
    links: Sequence[float],
) -> Table:
    """The least milliseconds of a step by network, format and link, and its longest part.

    A format has a rate, and the share of float32's bytes that it keeps for backward.
    """
    rows, roomy = [], math.inf
    for (network, step), (name, given), link in product(
        steps.items(), formats.items(), links
    ):
        rate, kept = given
        step = step._replace(saved=kept * step.saved)
        parts = {
            "computing": seconds_at_least(step, gpus, rate, roomy, roomy),
            "memory": seconds_at_least(step, gpus, roomy, memory, roomy),
            "sending": seconds_at_least(step, gpus, roomy, roomy, link),
        }
        longest = max(parts, key=parts.__getitem__)
        times = [f"{1000 * seconds:.2f} ms" for seconds in parts.values()]
        rows.append([network, name, f"{link / 1e9:g} GB/s", *times, longest])
    return Table(["", f"{gpus} GPUs in", "link", *parts, "longest"], rows)
