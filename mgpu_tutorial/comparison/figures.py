"""Apparatus: the stored comparison as tables, processor seconds and the logbook as pictures.

`benchmarks/comparison.py` measured it and wrote comparison.json beside this file: for each
kind first with what it was measured, and then the rows. A row of "parts" has the processor
seconds of forward, backward and update: what all threads of one process have computed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

    figure, lines = Figure(figsize=(9, 2.6), layout="constrained"), []
    networks = list(dict.fromkeys(row["network"] for row in rows))
    panels = figure.subplots(1, len(networks), sharey=True, squeeze=False)[0]
    for axes, network in zip(panels, networks, strict=True):
        mine = {row["setup"]: row["seconds"] for row in rows if row["network"] == network}
        for name, (forward, backward, update) in mine.items():
            share = f"{(forward + backward + update) / sum(mine['one device']):.2f}"
            first = axes.barh(name, forward, 0.72, label="forward", **FORWARD)
            rest = axes.barh(name, backward, 0.72, forward, label="backward", **BACKWARD)
            for bar in (first, rest):
                axes.bar_label(bar, fmt="%.1f", label_type="center", bbox=NUMBER)
            axes.bar_label(rest, [share], padding=6, fontsize=11, fontweight="bold")
            lines.append(f"{network}, {name}: {forward:.2f} + {backward:.2f} s, {share}")
        axes.set_title(network, loc="left", fontweight="bold")
        axes.margins(x=0.25)
        axes.tick_params(bottom=False, left=False, labelbottom=False, labelsize=11)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.invert_yaxis()
    figure.legend(handles=[first, rest], loc="outside upper right", ncols=2, frameon=False)
    return Plot(figure, "\n".join(lines))


def logbook_picture(logbook: Table, tokens: int = 8192) -> Plot:
    """A bar for each row: the milliseconds of that many tokens, computing and visible."""
    from matplotlib.figure import Figure

    rows = [dict(zip(logbook.header, row, strict=True)) for row in logbook.rows]
    figure = Figure(figsize=(9, 0.7 + 0.42 * len(rows)), layout="constrained")
    axes, lines = figure.subplots(), []
    for row in rows:
        ms, visible, rate = (
            float(row[column].replace(",", ""))
            for column in ("ms", "visible (ms)", "tokens/s per GPU")
        )
        whole = 1e3 * tokens / rate
        hidden = whole * (1 - visible / ms)
        first = axes.barh(row["way"], hidden, 0.72, label="computing", **FORWARD)
        rest = axes.barh(
            row["way"], whole - hidden, 0.72, hidden, label="visible", **BACKWARD
        )
        axes.bar_label(rest, [f"{whole:.0f}"], padding=6, fontsize=11, fontweight="bold")
        lines.append(f"{row['way']}: {hidden:.0f} + {whole - hidden:.0f} ms")
    axes.set_title(f"ms for {tokens:,} tokens of a GPU", loc="left", fontsize=11)
    axes.margins(x=0.12)
    axes.tick_params(left=False, labelsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()
    figure.legend(handles=[first, rest], loc="outside upper right", ncols=2, frameon=False)
    return Plot(figure, "\n".join(lines))
