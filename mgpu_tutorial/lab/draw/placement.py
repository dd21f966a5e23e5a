"""What lies on which device, step by step: a column a device, a box a tensor."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.draw.stepper import Stepper
from mgpu_tutorial.lab.draw.tables import Table
from mgpu_tutorial.lab.record.report import colour_of
from mgpu_tutorial.lab.simulate.devices import device_of

COLUMN, BOX, TOP = 196, 30, 74
Things = Mapping[str, torch.Tensor | nn.Module]
Item = tuple[str, str, str]  # name, device, shape


def where(things: Things) -> Table:
    """What lies on which device: a row for each tensor or module."""
    return Table(["", "device", "shape"], [list(item) for item in _items(things)])


def placement(steps: Sequence[tuple[str, Things]]) -> Stepper:
    """Make a frame of each step: its title, and all that is there after it.

    What is new has a thick border, what was there before a thin one.
    """
    frames = [(title, _items(things)) for title, things in steps]
    devices = sorted({device for _, items in frames for _, device, _ in items})
    tallest = max(
        sum(device == column for _, device, _ in items)
        for _, items in frames
        for column in devices
    )
    before = [[], *(items for _, items in frames[:-1])]
    return Stepper(
        [
            _frame(title, items, [i for i in items if i not in old], devices, tallest)
            for (title, items), old in zip(frames, before, strict=True)
        ]
    )


def _items(things: Things) -> list[Item]:
    rows = []
    for name, thing in things.items():
        if isinstance(thing, nn.Module):
            shape = f"{sum(p.numel() for p in thing.parameters()):,} numbers"
        else:
            shape = "×".join(map(str, thing.shape)) or "scalar"
        rows.append((name, str(device_of(thing)), shape))
    return rows


def _frame(
    title: str, items: list[Item], new: list[Item], devices: list[str], tallest: int
) -> Drawing:
    width, height = COLUMN * len(devices) + 20, TOP + (BOX + 8) * tallest + 8
    drawing = Drawing(width, height, _text(title, items, new, devices), title)
    drawing.label(14, 24, title, 15, anchor="start", weight="bold")
    for i, device in enumerate(devices):
        x = 12 + COLUMN * i
        drawing.box(x, 36, COLUMN - 10, height - 40, FAINT, "#ffffff", 1)
        drawing.label(x + 10, 58, device, 14, colour_of(device), "start", "bold")
        mine = [item for item in items if item[1] == device]
        for row, item in enumerate(mine):
            y, fresh = TOP + (BOX + 8) * row, item in new
            tone, fill = (INK, "#ffffff") if fresh else (FAINT, "#f2f2f2")
            drawing.box(x + 6, y, COLUMN - 22, BOX, tone, fill, 2.4 if fresh else 1)
            weight = "bold" if fresh else "normal"
            drawing.label(x + 14, y + 20, item[0], 13, INK, "start", weight)
            drawing.label(x + COLUMN - 22, y + 20, item[2], 12, INK, "end")
    return drawing


def _text(title: str, items: list[Item], new: list[Item], devices: list[str]) -> str:
    lines = [title]
    for device in devices:
        mine = [f"{'+ ' if i in new else ''}{i[0]} {i[2]}" for i in items if i[1] == device]
        lines.append(f"  {device}: {', '.join(mine) or 'nothing'}")
    return "\n".join(lines)
