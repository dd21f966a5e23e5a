"""Apparatus, not the lesson: what each cut of ResNet-50 costs, and the pipeline chart.

Memory, work and bytes follow from shapes: the network runs on PyTorch's meta device, which
computes nothing (https://docs.pytorch.org/docs/2.14/meta.html).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from mgpu_tutorial.lab import Ledger, Table
from mgpu_tutorial.lab.colours import tone
from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.words import bytes_text
from mgpu_tutorial.model_parallel.micro_batches import Task
from mgpu_tutorial.model_parallel.split_resnet import split, units
from mgpu_tutorial.shared.vision import torchvision


class Unit(NamedTuple):
    """What one unit, or one stage, needs for one batch.

    `flops` counts the operations of its forward, `saved` has the bytes of each storage that
    autograd keeps for its backward, and `output_bytes` are sent if a cut follows.
    """

    parameters: int
    flops: int
    saved: Mapping[object, int]
    output_bytes: int

    @property
    def memory(self) -> int:
        """Bytes in training; a parameter has a gradient and a momentum, float32 as itself."""
        return 12 * self.parameters + sum(self.saved.values())


@cache
def measure(batch: int = 4, image_size: int = 64) -> dict[str, Unit]:
    """The units of ResNet-50 for a batch of square images, in the order of its forward."""
    with torch.device("meta"):
        model = torchvision.models.resnet50()
        x = torch.empty(batch, 3, image_size, image_size)
    measured = {}
    for name, unit in units(model).items():
        ledger = Ledger()
        with ledger.saved_for_backward(unit), FlopCounterMode(display=False) as flops:
            x = unit(x)
        parameters = sum(p.numel() for p in unit.parameters())
        saved = ledger.storages("activations")
        measured[name] = Unit(parameters, flops.get_total_flops(), saved, x.nbytes)
        x = x.detach().requires_grad_()
    return measured


def stage_costs(measured: Mapping[str, Unit], cuts: Sequence[str]) -> list[Unit]:
    """What each stage needs; its input counts as its own: on another device it is a copy."""
    costs = []
    for stage in split(measured, cuts):
        parameters, flops, saved, outputs = zip(*stage.values(), strict=True)
        union = {key: nbytes for each in saved for key, nbytes in each.items()}
        costs.append(Unit(sum(parameters), sum(flops), union, outputs[-1]))
    return costs


def cut_table(measured: Mapping[str, Unit], *cuts: str) -> Table:
    """A row for each of these cuts into two, or for all: the fuller device, work, bytes."""
    rows = []
    for name in cuts or list(measured)[1:]:
        pair = first, _ = stage_costs(measured, [name])
        fuller = bytes_text(max(stage.memory for stage in pair))
        share = first.flops / sum(stage.flops for stage in pair)
        rows.append([name, fuller, f"{share:.0%}", bytes_text(first.output_bytes)])
    return Table(["cut before", "fuller device", "work of stage 0", "sends"], rows)


def tasks_of(report: Report, during: str | None = None) -> list[Task]:
    """The tasks of a traced launch, or of its span `during`, in the order of their begin.

    A rank marks a task with `span("F 2 5")`: the forward of stage 2 on micro-batch 5.
    """
    tasks = []
    for e in events_of(report, during):
        if mark := re.fullmatch(r"([FBIW]) (\d+) (\d+)", e.note):
            tasks.append(Task(e.begin, e.end, e.rank, int(mark[2]), mark[1], int(mark[3])))
    return sorted(tasks)


def duration(tasks: Sequence[Task]) -> float:
    """Seconds from the begin of the first task to the end of the last."""
    return max(t.end for t in tasks) - min(t.begin for t in tasks)


def idle_share(tasks: Sequence[Task]) -> float:
    """The bubble: the share of all rows' time, from 0 to 1, in which no task ran."""
    rows = len({t.row for t in tasks})
    return 1 - sum(t.end - t.begin for t in tasks) / (rows * duration(tasks))


def assert_quiet(one: Sequence[Task], two: Sequence[Task]) -> None:
    """Raise AssertionError where the machine was too busy to compare two steps."""
    busy = "the machine was busy: run this cell again"
    assert idle_share(one) < idle_share(two), busy


def in_order(tasks: Sequence[Task], row: int) -> list[str]:
    """What a row did, one after the other, such as F0 F1 B0 B1."""
    return [f"{t.kind}{t.micro}" for t in sorted(tasks) if t.row == row]


LOOKS = {  # strength of the row's colour
    "F": (0.22, "forward"),
    "B": (1, "backward"),
    "I": (1, "backward, input"),
    "W": (0.45, "backward, weights"),
}


EDGE = {"edgecolor": INK, "linewidth": 0.7}


def paler(row: int, strength: float) -> str:
    """The colour of a row, mixed with white."""
    channels = (int(tone(row).fill[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - strength * (255 - part)):02x}" for part in channels)


def pipeline_chart(
    tasks: Sequence[Task],
    title: str,
    row_name: str = "rank",
    *,
    above: tuple[Sequence[Task], str] | None = None,
    slot: float | None = None,
    is_priced: bool = False,
    follow: int | None = None,
) -> Plot:
    """A line for each row, a box with its micro-batch for each task: grey is idle time.

    A row's second stage has a prime: 3' is micro-batch 3. `above` are other tasks and their
    title, drawn over the same axis. Of tasks in slots `slot` is a slot's length; others are
    in seconds, measured or priced. The micro-batch to `follow` is black, and no box has a
    number then.
    """
    from matplotlib.figure import Figure  # a second to import: not for the ranks
    from matplotlib.patches import Patch

    charts = [*([above] if above else []), (tasks, title)]
    heights = [0.5 + 0.36 * len({t.row for t in own}) for own, _ in charts]
    figure = Figure(figsize=(9, 0.8 + sum(heights)), layout="constrained")
    grid = {"height_ratios": heights}
    panels = figure.subplots(len(charts), sharex=True, squeeze=False, gridspec_kw=grid)[:, 0]
    texts = []
    for axes, (own, name) in zip(panels, charts, strict=True):
        length, rows = duration(own), sorted({t.row for t in own})
        _draw_tasks(axes, own, row_name, length, follow)
        total = f"{length / slot:g} slots" if slot else f"{1e3 * length:.0f} ms"
        says = f"{name}: {total}, idle {idle_share(own):.0%}"
        axes.set_title(says, loc="left")
        lines = (f"{row_name} {row}: {' '.join(in_order(own, row))}" for row in rows)
        texts.append("\n".join([says if slot or is_priced else name, *lines]))
    axes.set_xlim(0, max(duration(own) for own, _ in charts))
    how = "priced, not measured" if is_priced else "measured on this machine"
    axes.set_xlabel("slots" if slot else f"milliseconds ({how})")
    axes.locator_params(axis="x", integer=bool(slot))
    axes.xaxis.set_major_formatter(lambda at, _: f"{at / slot if slot else 1e3 * at:g}")
    kinds = dict.fromkeys(t.kind for own, _ in charts for t in sorted(own))
    handles = [Patch(facecolor="#e4e4e4", label="idle")]
    for kind in kinds:  # in the colour of the first row
        strength, meaning = LOOKS[kind]
        label = f"{kind}: {meaning}"
        handles.append(Patch(facecolor=paler(0, strength), label=label, **EDGE))
    if follow is not None:
        handles.append(Patch(facecolor=INK, label="one micro-batch"))
    figure.legend(handles=handles, loc="outside upper right", ncols=6, frameon=False)
    return Plot(figure, "\n".join(texts))


def _draw_tasks(
    axes: Any, tasks: Sequence[Task], row_name: str, length: float, follow: int | None
) -> None:
    """The boxes of one chart."""
    rows = sorted({t.row for t in tasks})
    start = min(t.begin for t in tasks)
    axes.barh(range(len(rows)), length, 0.84, color="#e4e4e4")
    stages = {row: sorted({t.stage for t in tasks if t.row == row}) for row in rows}
    for kind in dict.fromkeys(t.kind for t in sorted(tasks)):
        own, (strength, _) = [t for t in tasks if t.kind == kind], LOOKS[kind]
        lefts, widths = [t.begin - start for t in own], [t.end - t.begin for t in own]
        places = [rows.index(t.row) for t in own]
        fills = [INK if t.micro == follow else paler(t.row, strength) for t in own]
        look = {"color": fills, **EDGE}
        bars = axes.barh(places, widths, 0.84, lefts, **look)
        if follow is not None:
            continue
        names = [f"{t.micro}" + "'" * stages[t.row].index(t.stage) for t in own]
        fitting = [n if w > 0.01 * length else "" for n, w in zip(names, widths, strict=True)]
        size = 10 if max(widths) > 0.025 * length else 7
        look = {"fontweight": "bold", "fontsize": size}
        labels = axes.bar_label(bars, fitting, label_type="center", **look)
        for label, task in zip(labels, own, strict=True):
            label.set_color(tone(task.row).on if strength > 0.8 else INK)
    axes.set_yticks(range(len(rows)), [f"{row_name} {row}" for row in rows])
    for row, tick in zip(rows, axes.get_yticklabels(), strict=True):
        tick.set(color=tone(row).text, fontweight="bold")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def within_rounding(found: Iterable, expected: Iterable, within: float) -> str:
    """How many gradients are as expected, but for so small a part of their length."""
    pairs = zip(found, expected, strict=True)
    near = [(a - b).norm() <= within * b.norm() for a, b in pairs]
    return f"{sum(near)} of {len(near)} gradients within rounding"
