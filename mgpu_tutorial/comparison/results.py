"""Apparatus: sum up, store, read and draw the rows of the comparison.

`benchmarks/comparison.py` measured it and wrote comparison.json beside this file. There a
row is one setup, with the seconds of 20 iterations of the slowest rank, the bytes that each
device held, and the number of processes. A row that needs more GPUs than the machine has
was not measured.
Under "parts" a row is the processor seconds of forward, backward and update.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mgpu_tutorial.comparison.training import Measured
from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.colours import COLOURS
from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.words import bytes_text

STORED = Path(__file__).with_name("comparison.json")
NOT_MEASURED = "not measured"
OLD_FIGURES = {"DataParallel": 20.4, "DDP": 8.7, "best half precision": 7.2}
ONE_THREAD = "backward: one thread on a CPU"


def load_stored(kind: str = "cpu") -> dict[str, Any] | None:
    """What is stored for "cpu", "cuda" or "parts"; None where that was never measured.

    FileNotFoundError where nothing was stored at all.
    """
    if not STORED.exists():
        raise FileNotFoundError(
            f"no stored comparison: {STORED.name} is missing. Make it with "
            "python benchmarks/comparison.py --save"
        )
    return json.loads(STORED.read_text(encoding="utf-8")).get(kind)


def summarise(ranks: Sequence[Measured]) -> dict[str, Any]:
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
    rows = []
    first = result["rows"][network]["one device"]["seconds"]
    for name, found in result["rows"][network].items():
        if found == NOT_MEASURED:
            rows.append([name, *[NOT_MEASURED] * 4])
            continue
        counted = [sum(held.values()) for held in found["memory"]]
        memory = ", ".join(bytes_text(n) for n in found["peaks"] or counted)
        seconds = found["seconds"]
        speed = f"{first / seconds:.2f}"
        rows.append([name, f"{seconds:.1f}", speed, memory, found["processes"]])
    header = ["setup", "s per 20 iterations", "speed", "memory per device", "processes"]
    return Table(header, rows)


def parts_table(result: dict[str, Any], network: str) -> Table:
    """A row per way: processor seconds of the parts of a step, and of all together."""
    rows = [
        [name, *(f"{part:.3f}" for part in (*parts, sum(parts)))]
        for name, parts in result["rows"][network].items()
    ]
    return Table(["processor seconds", "forward", "backward", "update", "step"], rows)


def chart(result: dict[str, Any]) -> Plot:
    """Seconds of 20 iterations as bars, a panel per network, the old figures below.

    Its text has the same numbers; they come from the file and are the same in every run.
    """
    from matplotlib.figure import Figure

    panels = {
        f"{network}: {result['device']}": {
            name: found if found == NOT_MEASURED else found["seconds"]
            for name, found in rows.items()
        }
        for network, rows in result["rows"].items()
    }
    panels["an old unpublished note, other hardware (s at iteration 100)"] = OLD_FIGURES
    heights = [1 + len(panel) for panel in panels.values()]
    figure = Figure(figsize=(9, 0.36 * sum(heights)), layout="constrained")
    grid = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    lines = ["Seconds of 20 iterations as bars, by how they were trained"]
    for axes, (title, panel) in zip(grid, panels.items(), strict=True):
        unit = "" if panel is OLD_FIGURES else " (s per 20 iterations)"
        axes.set_title(title + unit, loc="left", fontsize=11, weight="bold")
        lines.append(title)
        for name, seconds in panel.items():
            remark = _remark(name, result["device"]) if panel is not OLD_FIGURES else ""
            _draw_bar(axes, name, seconds, remark, quoted=panel is OLD_FIGURES)
            lines.append(f"  {name}: {seconds}" + f" ({remark})" * bool(remark))
        axes.set_xlim(0, 1.65 * max(s for s in panel.values() if s != NOT_MEASURED))
        axes.set_xticks([])
        axes.tick_params(axis="y", length=0, labelsize=11)
        axes.invert_yaxis()
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    return Plot(figure, "\n".join(lines))


def _remark(name: str, device: str) -> str:
    return ONE_THREAD if name == "DataParallel" and device.startswith("CPU") else ""


def _draw_bar(axes, name: str, seconds: float | str, remark: str, quoted: bool) -> None:
    if seconds == NOT_MEASURED:
        axes.barh(name, 0)
        axes.text(0, name, f" {NOT_MEASURED}", va="center", color=INK, fontsize=11)
        return
    colour = COLOURS[1] if "autocast" in name else COLOURS[0]
    style = {"color": "white", "linestyle": "--"} if quoted else {"color": colour}
    hatch = "//" if "autocast" in name else ""  # told apart in grey too
    (bar,) = axes.barh(name, seconds, height=0.72, edgecolor=INK, hatch=hatch, **style)
    axes.text(bar.get_width(), name, f" {seconds:.1f}", va="center", weight="bold")
    if remark:
        axes.annotate(
            remark,
            (bar.get_width(), name),
            (38, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
        )
