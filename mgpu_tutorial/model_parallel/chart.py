"""The pipeline chart: which stage worked on which micro-batch, forward or backward, when.

A rank marks each task with `span("F 2 5")`: the forward of stage 2 on micro-batch 5. B is a
backward; of a split one I is the half for the input and W the half for the weights. A
`span("step")` stands around each step.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from mgpu_tutorial.lab.colours import tone
from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.report import Report

LOOKS = {  # strength of the row's colour
    "F": (0.22, "forward"),
    "B": (1.0, "backward"),
    "I": (1.0, "backward, input"),
    "W": (0.55, "backward, weights"),
}


class Task(NamedTuple):
    """What a device does at one time: `row` is its rank or number, times are in seconds."""

    row: int
    stage: int
    kind: str
    micro: int
    begin: float
    end: float


def pipeline_steps(report: Report) -> list[list[Task]]:
    """The tasks of each step of a traced launch."""
    steps: dict[int, list[Task]] = defaultdict(list)
    for rank in range(report.world_size):
        step = -1
        for event in (e for e in report.events if e.rank == rank and e.kind == "span"):
            step += event.note == "step"
            mark = re.fullmatch(r"([FBIW]) (\d+) (\d+)", event.note)
            if mark and event.end is not None:
                kind, stage, micro = mark[1], int(mark[2]), int(mark[3])
                steps[step].append(Task(rank, stage, kind, micro, event.begin, event.end))
    return [steps[step] for step in sorted(steps)]


def duration(tasks: Sequence[Task]) -> float:
    """Seconds from the begin of the first task to the end of the last."""
    return max(t.end for t in tasks) - min(t.begin for t in tasks)


def idle_share(tasks: Sequence[Task]) -> float:
    """The bubble: the share of all rows' time, from 0 to 1, in which no task ran."""
    rows = len({t.row for t in tasks})
    return 1 - sum(t.end - t.begin for t in tasks) / (rows * duration(tasks))


def in_order(tasks: Sequence[Task], row: int) -> list[str]:
    """What a row did, one after the other, such as F0 F1 B0 B1."""
    tasks_of_row = sorted((t for t in tasks if t.row == row), key=lambda t: t.begin)
    return [f"{t.kind}{t.micro}" for t in tasks_of_row]


def pipeline_chart(tasks: Sequence[Task], title: str, row_name: str = "rank") -> Plot:
    """Draw a box for each task, a row for each rank: idle time is the grey between them.

    A row with several stages is divided among them. The number in a box is its micro-batch.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure  # a second to import: not for the ranks

    rows = sorted({t.row for t in tasks})
    stages = {n: sorted({t.stage for t in tasks if t.row == n}) for n in rows}
    each = max(map(len, stages.values()))
    tall = len(rows) * max(0.5, 0.36 * each)
    figure = Figure(figsize=(9, tall + 1.15))  # all are as wide, so that one can compare
    axes = figure.add_axes((0.11, 0.55 / (tall + 1.15), 0.87, tall / (tall + 1.15)))
    start, length, height = min(t.begin for t in tasks), 1e3 * duration(tasks), 0.84 / each
    axes.set(xlim=(0, length), ylim=(len(rows) - 0.5, -0.5))
    handles = {"idle": axes.barh(range(len(rows)), length, 0.84, color="#e4e4e4", zorder=0)}
    for t in sorted(tasks, key=lambda t: (t.row, t.begin)):
        own, (strength, meaning) = tone(t.row), LOOKS[t.kind]
        left, width = 1e3 * (t.begin - start), 1e3 * (t.end - t.begin)
        y = rows.index(t.row) - 0.42 + height * (stages[t.row].index(t.stage) + 0.5)
        look = {"color": [1 - strength * (1 - part) for part in to_rgb(own.fill)]}
        bar = axes.barh(y, width, height, left, edgecolor=INK, linewidth=0.7, **look)
        handles.setdefault(f"{t.kind}: {meaning}", bar)
        points = min(11, 560 * width / length / len(str(t.micro)))
        if points >= 6:  # a smaller number could not be read
            look = {"fontsize": points, "color": own.on if strength == 1 else INK}
            look |= {"ha": "center", "va": "center", "fontweight": "bold"}
            axes.text(left + width / 2, y, str(t.micro), **look)
    several = {n: f"\nstages {', '.join(map(str, stages[n]))}" * (each > 1) for n in rows}
    axes.set_yticks(range(len(rows)), [f"{row_name} {n}{several[n]}" for n in rows])
    for n, tick in zip(rows, axes.get_yticklabels(), strict=True):
        tick.set(color=tone(n).text, fontweight="bold", fontsize=10)
    axes.set_xlabel("milliseconds (measured on this machine)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"{title}: idle {idle_share(tasks):.0%}", loc="left", fontsize=12)
    place = {"loc": "upper right", "bbox_to_anchor": (0.98, 0.98), "borderpad": 0}
    figure.legend(handles.values(), handles, ncols=len(handles), frameon=False, **place)
    text = "\n".join(f"{row_name} {n}: {' '.join(in_order(tasks, n))}" for n in rows)
    return Plot(figure, f"{title}\n{text}")
