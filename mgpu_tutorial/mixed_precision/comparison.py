"""Read and draw the stored comparison: one network, one global batch, trained in six ways.

`benchmarks/comparison.py` measured it and wrote comparison.json beside this file. There a
row is one setup, with the seconds of 20 iterations of the slowest rank, the bytes that each
device held, and the number of processes. A row that needs more GPUs than the machine has
was not measured.
"""

import json
from pathlib import Path
from typing import Any

from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.colours import COLOURS
from mgpu_tutorial.lab.draw.drawing import FAINT, INK
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.words import bytes_text

STORED = Path(__file__).with_name("comparison.json")
NOT_MEASURED = "not measured"
FIELD_REPORT = {"DataParallel": 20.4, "DDP": 8.7, "best half precision": 7.2}
ONE_THREAD = "backward: one thread on a CPU"


def load_stored(kind: str = "cpu") -> dict[str, Any] | None:
    """The stored result for "cpu" or "cuda"; None where that was never measured.

    FileNotFoundError where nothing was stored at all.
    """
    if not STORED.exists():
        raise FileNotFoundError(
            f"no stored comparison: {STORED.name} is missing. Make it with "
            "python benchmarks/comparison.py --save"
        )
    return json.loads(STORED.read_text(encoding="utf-8")).get(kind)


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


def chart(result: dict[str, Any]) -> Plot:
    """Seconds of 20 iterations as bars, a panel per network, the field report's below.

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
    panels["quoted from the field report, other hardware, years ago"] = FIELD_REPORT
    heights = [1 + len(panel) for panel in panels.values()]
    figure = Figure(figsize=(9, 0.36 * sum(heights)), layout="constrained")
    grid = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    lines = ["Seconds of 20 iterations as bars, by how they were trained"]
    for axes, (title, panel) in zip(grid, panels.items(), strict=True):
        axes.set_title(
            f"{title} (s per 20 iterations)", loc="left", fontsize=11, weight="bold"
        )
        lines.append(title)
        for name, seconds in panel.items():
            remark = _remark(name, result["device"]) if panel is not FIELD_REPORT else ""
            _draw_bar(axes, name, seconds, remark, quoted=panel is FIELD_REPORT)
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
        axes.text(0, name, f" {NOT_MEASURED}", va="center", color=FAINT, fontsize=11)
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
