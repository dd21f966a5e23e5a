"""Apparatus: the stored comparison as tables, and processor seconds as a picture.

`benchmarks/comparison.py` measured it and wrote comparison.json beside this file: for each
kind first with what it was measured, and then the rows. A row of "parts" has the processor
seconds of forward, backward and update: what all threads of one process have computed.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from mgpu_tutorial.comparison.estimates import StepCost, seconds_at_least
from mgpu_tutorial.comparison.training import SetupResult
from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.words import bytes_text

STORED = Path(__file__).with_name("comparison.json")
FORWARD = {"facecolor": "#a9c9e8", "edgecolor": INK, "linewidth": 0.6}
BACKWARD = {**FORWARD, "facecolor": "#f2b36b", "hatch": "////"}
NUMBER = {"facecolor": "white", "linewidth": 0, "pad": 1.2}


def load_stored(kind: str) -> list[dict[str, Any]]:
    """What is stored for "cpu", "cuda" or "parts": about it first, then the rows."""
    return json.loads(STORED.read_text(encoding="utf-8"))[kind]


def save(kind: str, found: Sequence[dict[str, Any]]) -> None:
    """Store what was measured, a row a line; what other kinds have stays."""
    stored = json.loads(STORED.read_text(encoding="utf-8")) | {kind: found}
    parts = [
        f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, rows)) + "\n]"
        for name, rows in stored.items()
    ]
    STORED.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def summarise(ranks: Sequence[SetupResult]) -> dict[str, Any]:
    """20 times the median iteration of the slowest rank; the bytes of every device."""
    seconds = [map(sum, rank.seconds) for rank in ranks]
    slowest = map(max, zip(*seconds, strict=True))
    counted = [sum(device.values()) for rank in ranks for device in rank.memory]
    return {
        "seconds": round(20 * statistics.median(slowest), 2),
        "memory": [peak for rank in ranks for peak in rank.peaks] or counted,
        "processes": len({rank.pid for rank in ranks}),
    }


def table(rows: Sequence[dict[str, Any]], network: str) -> Table:
    """A row per setup: seconds, speed against one device, memory per device, processes."""
    cells = []
    rows = [row for row in rows if row["network"] == network]
    for row in rows:
        speed = rows[0]["seconds"] / row["seconds"]
        memory = ", ".join(map(bytes_text, row["memory"]))
        numbers = f"{row['seconds']:.1f}", f"{speed:.2f}", memory, row["processes"]
        cells.append([row["setup"], *numbers])
    header = ["setup", "s per 20 iterations", "speed", "memory per device", "processes"]
    return Table(header, cells)


def parts_picture(rows: Sequence[dict[str, Any]]) -> Plot:
    """Processor seconds of forward and backward, and the step as a share of one device's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6), layout="constrained")
    networks = list(dict.fromkeys(row["network"] for row in rows))
    panels = figure.subplots(1, len(networks), sharey=True, squeeze=False)[0]
    lines = []
    for axes, network in zip(panels, networks, strict=True):
        mine = {row["setup"]: row["seconds"] for row in rows if row["network"] == network}
        forward, backward, _ = zip(*mine.values(), strict=True)
        shares = [f"{sum(parts) / sum(mine['one device']):.2f}" for parts in mine.values()]
        first = axes.barh(list(mine), forward, 0.72, label="forward", **FORWARD)
        rest = axes.barh(list(mine), backward, 0.72, forward, label="backward", **BACKWARD)
        for bars in (first, rest):
            axes.bar_label(bars, fmt="%.1f", label_type="center", bbox=NUMBER)
        axes.bar_label(rest, shares, padding=6, fontsize=11, fontweight="bold")
        axes.set_title(network, loc="left", fontweight="bold")
        axes.margins(x=0.25)
        axes.tick_params(bottom=False, left=False, labelbottom=False, labelsize=11)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        for name, f, b, share in zip(mine, forward, backward, shares, strict=True):
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
    rows, no, parts = [], math.inf, ("computing", "memory", "sending")
    for (network, step), (name, (rate, kept)), link in product(
        steps.items(), formats.items(), links
    ):
        step = step._replace(saved=kept * step.saved)
        limits = (rate, no, no), (no, memory, no), (no, no, link)
        seconds = [seconds_at_least(step, gpus, *limit) for limit in limits]
        longest = parts[seconds.index(max(seconds))]
        times = [f"{1000 * value:.2f} ms" for value in seconds]
        rows.append([network, name, f"{link / 1e9:g} GB/s", *times, longest])
    return Table(["", f"{gpus} GPUs in", "link", *parts, "longest"], rows)
