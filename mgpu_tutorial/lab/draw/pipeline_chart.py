"""The pipeline chart: which stage worked on which micro-batch, forward or backward, when.

A rank marks each piece of work with `span("F 2 5")`: the forward of stage 2 on micro-batch
5. F is a forward and B a backward; where a schedule splits the backward, I makes the gradient
of the stage's input and W those of its weights. Around each step stands a `span("step")`.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.report import Report, colour

IDLE = "#ececec"
LOOKS = {  # strength of the lane's colour, colour of the number, hatch, meaning
    "F": (0.22, INK, "", "forward"),
    "B": (1.0, "white", "", "backward"),
    "I": (1.0, "white", "", "backward, input only"),
    "W": (0.45, INK, "////", "backward, weights only"),
}


class Task(NamedTuple):
    """One piece of work: `lane` is a rank or a device, `begin` and `end` are seconds."""

    lane: int
    stage: int
    kind: str
    micro: int
    begin: float
    end: float


def steps(report: Report) -> list[list[Task]]:
    """The tasks of each step of a launch; ValueError where its ranks marked none."""
    found: dict[int, list[Task]] = defaultdict(list)
    for rank in range(report.world_size):
        step = -1
        for event in (e for e in report.events if e.rank == rank and e.kind == "span"):
            step += event.note == "step"
            mark = re.fullmatch(r"([FBIW]) (\d+) (\d+)", event.note)
            if mark and event.end is not None:
                kind, stage, micro = mark[1], int(mark[2]), int(mark[3])
                found[step].append(Task(rank, stage, kind, micro, event.begin, event.end))
    if not found:
        raise ValueError("no stage was recorded: launch with trace=True")
    return [found[step] for step in sorted(found)]


def seconds(tasks: Sequence[Task]) -> float:
    """From the begin of the first task to the end of the last."""
    return max(t.end for t in tasks) - min(t.begin for t in tasks)


def quickest(found: Sequence[Sequence[Task]]) -> Sequence[Task]:
    """The step that took least: the others lost more time to whatever else was running."""
    return min(found, key=seconds)


def idle_share(tasks: Sequence[Task]) -> float:
    """The part of all lanes' time, from 0 to 1, in which no task ran: the bubble."""
    lanes = len({t.lane for t in tasks})
    return 1 - sum(t.end - t.begin for t in tasks) / (lanes * seconds(tasks))


def in_flight(tasks: Sequence[Task], lane: int) -> int:
    """The most micro-batches whose forward a lane had done, and not yet their backward."""
    waiting = most = 0
    for kind in (name[0] for name in in_order(tasks, lane)):
        waiting += {"F": 1, "B": -1, "I": -1, "W": 0}[kind]
        most = max(most, waiting)
    return most


def in_order(tasks: Sequence[Task], lane: int) -> list[str]:
    """What a lane did, one after the other, such as F0 F1 B0 B1."""
    mine = sorted((t for t in tasks if t.lane == lane), key=lambda t: t.begin)
    return [f"{t.kind}{t.micro}" for t in mine]


def pipeline_chart(tasks: Sequence[Task], title: str, lane: str = "rank") -> Plot:
    """Draw a box for each task, a lane for each rank: idle time is the grey between them.

    A lane with several stages has a row for each. The number in a box is its micro-batch.
    Raises ValueError where there is no task.
    """
    if not tasks:
        raise ValueError("there is no task to draw")
    lanes = sorted({t.lane for t in tasks})
    rows = {n: sorted({t.stage for t in tasks if t.lane == n}) for n in lanes}
    figure, axes = _canvas(lanes, rows, lane)
    start, length = min(t.begin for t in tasks) * 1e3, seconds(tasks) * 1e3
    axes.set_xlim(0, length)
    for number in lanes:
        y = lanes.index(number) - 0.42
        axes.broken_barh([(0, length)], (y, 0.84), facecolor=IDLE, zorder=0)
    for key in {(t.lane, t.stage, t.kind) for t in tasks}:
        alike = [t for t in tasks if (t.lane, t.stage, t.kind) == key]
        height = 0.84 / len(rows[key[0]])
        y = lanes.index(key[0]) - 0.42 + height * rows[key[0]].index(key[1])
        _boxes(axes, alike, start, (y, height), length)
    _legend(figure, {t.kind for t in tasks})
    axes.set_title(f"{title}: idle {idle_share(tasks):.0%}", loc="left", fontsize=12)
    text = "\n".join(f"{lane} {n}: {' '.join(in_order(tasks, n))}" for n in lanes)
    return Plot(figure, f"{title}\n{text}")


def _canvas(lanes: list[int], rows: dict[int, list[int]], name: str):
    from matplotlib.figure import Figure  # a second to import: not for the ranks

    tall = sum(0.5 if len(stages) == 1 else 0.3 * len(stages) for stages in rows.values())
    high = 1.15 + tall  # inches; all charts are as wide, so that they can be compared
    figure = Figure(figsize=(9, high))
    axes = figure.add_axes((0.11, 0.55 / high, 0.87, tall / high))
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    several = any(len(stages) > 1 for stages in rows.values())
    names = [
        f"{name} {n}" + (f"\nstages {', '.join(map(str, rows[n]))}" if several else "")
        for n in lanes
    ]
    axes.set_yticks(range(len(lanes)), names)
    for n, tick in zip(lanes, axes.get_yticklabels(), strict=True):
        tick.set(color=colour(n), fontweight="bold", fontsize=10 if several else 12)
    axes.set_xlabel("milliseconds (measured on this machine)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure, axes


def _boxes(axes, tasks: list[Task], start: float, row: tuple[float, float], length: float):
    """The tasks of one kind in one row, each with the number of its micro-batch."""
    from matplotlib.patheffects import withStroke

    kind, lane = tasks[0].kind, tasks[0].lane
    strength, ink, hatch, _ = LOOKS[kind]
    face = _mixed(colour(lane), strength)
    spans = [(1e3 * t.begin - start, 1e3 * (t.end - t.begin)) for t in tasks]
    axes.broken_barh(spans, row, facecolor=face, edgecolor=INK, hatch=hatch, linewidth=0.7)
    look = {"fontsize": 10 if row[1] > 0.5 else 8, "color": ink, "fontweight": "bold"}
    halo = [withStroke(linewidth=2.5, foreground="white")] if hatch else []
    place = {"ha": "center", "va": "center", "in_layout": False, "path_effects": halo}
    for task, (x, width) in zip(tasks, spans, strict=True):
        if width > 0.012 * length:  # else too narrow for a number
            axes.text(x + width / 2, row[0] + row[1] / 2, str(task.micro), **look, **place)


def _mixed(tone: str, strength: float) -> str:
    """The colour that `tone` gives on white paper with this strength."""
    parts = (int(tone[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - strength * (255 - part)):02x}" for part in parts)


def _legend(figure, kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    patches = []
    for kind, (strength, _, hatch, meaning) in LOOKS.items():
        if kind in kinds:
            face, label = _mixed("#404040", strength), f"{kind}: {meaning}"
            patches.append(Patch(facecolor=face, edgecolor=INK, hatch=hatch, label=label))
    patches.append(Patch(facecolor=IDLE, label="idle"))
    look = {"ncols": len(patches), "frameon": False, "fontsize": 10, "borderpad": 0}
    figure.legend(handles=patches, loc="upper right", bbox_to_anchor=(0.98, 0.98), **look)
