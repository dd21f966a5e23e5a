"""What lies on which device, step by step: a column per device, a box per tensor."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from mgpu_tutorial.lab.colours import tone_of
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.draw.stepper import Stepper
from mgpu_tutorial.lab.simulate.devices import device_of
from mgpu_tutorial.lab.table import Table

COLUMN, BOX, TOP = 196, 30, 74  # pixels: width, height, and where the first box begins
Thing = torch.Tensor | nn.Module
Things = Mapping[str, Thing | Sequence[Thing]]


class Item(NamedTuple):
    """A tensor or a module: its name, where it is, and its shape or its count of numbers."""

    name: str
    device: str
    shape: str


def device_table(things: Things) -> Table:
    """What lies on which device: a row for each tensor or module.

    Several things of one name are numbered: `{"piece": [a, b]}` is "piece 0", "piece 1".
    """
    return Table(["", "device", "shape"], [list(item) for item in items_of(things)])


def placement(steps: Sequence[tuple[str, Things]]) -> Stepper:
    """Make a frame of each step: its title, and all that is there after it.

    What is new has a thick border, what was there before a thin one.
    """
    frames = [(title, items_of(things)) for title, things in steps]
    devices = sorted({item.device for _, items in frames for item in items})
    most = max(
        sum(item.device == device for item in items)
        for _, items in frames
        for device in devices
    )
    drawings, old = [], []
    for title, items in frames:
        drawings.append(_frame(title, items, old, devices, most))
        old = items
    return Stepper(drawings)


def items_of(things: Things) -> list[Item]:
    """The rows of `things`, in their order."""
    found = []
    for name, value in things.items():
        if isinstance(value, list | tuple) and len(value) > 1:
            found += [Item(f"{name} {i}", *_where(thing)) for i, thing in enumerate(value)]
        elif isinstance(value, list | tuple):
            found += [Item(name, *_where(thing)) for thing in value]
        else:
            found.append(Item(name, *_where(value)))
    return found


def _where(thing: Thing) -> tuple[str, str]:
    if isinstance(thing, nn.Module):
        shape = f"{sum(p.numel() for p in thing.parameters()):,} numbers"
    else:
        shape = "×".join(map(str, thing.shape)) or "scalar"
    return str(device_of(thing)), shape


def _frame(
    title: str, items: list[Item], old: list[Item], devices: list[str], most: int
) -> Drawing:
    height = TOP + (BOX + 8) * most + 8
    text = _text(title, items, old, devices)
    drawing = Drawing(COLUMN * len(devices) + 20, height, text, title)
    drawing.label(14, 24, title, 15, anchor="start", weight="bold")
    for i, device in enumerate(devices):
        x = 12 + COLUMN * i
        drawing.box(x, 36, COLUMN - 10, height - 40, FAINT, "#ffffff", 1)
        drawing.label(x + 10, 58, device, 14, tone_of(device).text, "start", "bold")
        for row, item in enumerate(item for item in items if item.device == device):
            _box(drawing, x, TOP + (BOX + 8) * row, item, item not in old)
    return drawing


def _box(drawing: Drawing, x: float, y: float, item: Item, new: bool) -> None:
    if new:
        drawing.box(x + 6, y, COLUMN - 22, BOX, INK, "#ffffff", 2.4)
    else:
        drawing.box(x + 6, y, COLUMN - 22, BOX, FAINT, "#f2f2f2", 1)
    weight = "bold" if new else "normal"
    drawing.label(x + 14, y + 20, item.name, 14, INK, "start", weight)
    drawing.label(x + COLUMN - 22, y + 20, item.shape, 14, INK, "end")


def _text(title: str, items: list[Item], old: list[Item], devices: list[str]) -> str:
    lines = [title]
    for device in devices:
        mine = [item for item in items if item.device == device]
        words = [f"{'' if i in old else '+ '}{i.name} {i.shape}" for i in mine]
        lines.append(f"  {device}: {', '.join(words) or 'nothing'}")
    return "\n".join(lines)
