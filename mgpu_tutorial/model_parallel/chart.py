"""The pipeline chart: which stage worked on which micro-batch, forward or backward, when."""

from collections.abc import Sequence

from mgpu_tutorial.lab.colours import tone
from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.model_parallel.tasks import Task, duration, idle_share, in_order

IDLE = "#e4e4e4"
LOOKS = {  # strength of the row's colour
    "F": (0.22, "forward"),
    "B": (1.0, "backward"),
    "I": (1.0, "backward, input"),
    "W": (0.55, "backward, weights"),
}
WIDTH, LEFT, RIGHT = 9.0, 0.11, 0.02  # inches; the margins are shares of the width
SMALLEST = 6.0  # points: a smaller number could not be read


def pipeline_chart(tasks: Sequence[Task], title: str, row_name: str = "rank") -> Plot:
    """Draw a box for each task, a row for each rank: idle time is the grey between them.

    A row with several stages is divided among them. The number in a box is its micro-batch.
    """
    rows = sorted({t.row for t in tasks})
    stages = {n: sorted({t.stage for t in tasks if t.row == n}) for n in rows}
    figure, axes = _canvas(rows, stages, row_name)
    start, length = min(t.begin for t in tasks) * 1e3, duration(tasks) * 1e3
    axes.set_xlim(0, length)
    for y in range(len(rows)):
        axes.broken_barh([(0, length)], (y - 0.42, 0.84), facecolor=IDLE, zorder=0)
    for key in sorted({(t.row, t.stage, t.kind) for t in tasks}):
        alike = [t for t in tasks if (t.row, t.stage, t.kind) == key]
        height = 0.84 / len(stages[key[0]])
        y = rows.index(key[0]) - 0.42 + height * stages[key[0]].index(key[1])
        _boxes(axes, alike, start, (y, height), length)
    _legend(figure, {t.kind for t in tasks})
    axes.set_title(f"{title}: idle {idle_share(tasks):.0%}", loc="left", fontsize=12)
    text = "\n".join(f"{row_name} {n}: {' '.join(in_order(tasks, n))}" for n in rows)
    return Plot(figure, f"{title}\n{text}")


def _canvas(rows: list[int], stages: dict[int, list[int]], name: str):
    from matplotlib.figure import Figure  # a second to import: not for the ranks

    tall = sum(0.5 if len(of_row) == 1 else 0.36 * len(of_row) for of_row in stages.values())
    high = 1.15 + tall  # inches; all charts are as wide, so that they can be compared
    figure = Figure(figsize=(WIDTH, high))
    axes = figure.add_axes((LEFT, 0.55 / high, 1 - LEFT - RIGHT, tall / high))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    several = any(len(of_row) > 1 for of_row in stages.values())
    names = [
        f"{name} {n}" + (f"\nstages {', '.join(map(str, stages[n]))}" if several else "")
        for n in rows
    ]
    axes.set_yticks(range(len(rows)), names)
    for n, tick in zip(rows, axes.get_yticklabels(), strict=True):
        tick.set(color=tone(n).text, fontweight="bold", fontsize=10 if several else 12)
    axes.set_xlabel("milliseconds (measured on this machine)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure, axes


def _boxes(axes, tasks: list[Task], start: float, place: tuple[float, float], length: float):
    """The tasks of one kind in one row, each with the number of its micro-batch."""
    own, (strength, _) = tone(tasks[0].row), LOOKS[tasks[0].kind]
    spans = [(1e3 * t.begin - start, 1e3 * (t.end - t.begin)) for t in tasks]
    style = {"facecolor": _mixed(own.fill, strength), "edgecolor": INK, "linewidth": 0.7}
    axes.broken_barh(spans, place, **style)
    points = 72 * WIDTH * (1 - LEFT - RIGHT) / length  # per millisecond
    for task, (x, width) in zip(tasks, spans, strict=True):
        size = min(11, width * points / len(str(task.micro)))
        if size >= SMALLEST:
            look = {"color": own.on if strength == 1 else INK, "fontsize": size}
            look |= {"ha": "center", "va": "center", "fontweight": "bold"}
            axes.text(x + width / 2, place[0] + place[1] / 2, str(task.micro), **look)


def _mixed(fill: str, strength: float) -> str:
    """The colour that `fill` gives on white paper with this strength."""
    parts = (int(fill[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - strength * (255 - part)):02x}" for part in parts)


def _legend(figure, kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    patches = []
    for kind, (strength, meaning) in ((k, LOOKS[k]) for k in LOOKS if k in kinds):
        fill = _mixed(tone(0).fill, strength)  # a grey box would look idle
        patches.append(Patch(facecolor=fill, edgecolor=INK, label=f"{kind}: {meaning}"))
    patches.append(Patch(facecolor=IDLE, edgecolor=INK, linewidth=0.5, label="idle"))
    look = {"ncols": len(patches), "frameon": False, "fontsize": 10, "borderpad": 0}
    figure.legend(handles=patches, loc="upper right", bbox_to_anchor=(0.98, 0.98), **look)
