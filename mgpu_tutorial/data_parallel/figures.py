"""Apparatus, not the lesson: where things are after each step, bytes, one step's results."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.data_parallel.experiments import WithLoss
from mgpu_tutorial.data_parallel.wrapper import (
    DataParallel,
    Devices,
    gather,
    parallel_apply,
    replicate,
    scatter,
)
from mgpu_tutorial.lab import Ledger
from mgpu_tutorial.lab.colours import tone_of
from mgpu_tutorial.lab.devices import device_of
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.draw.film import Film
from mgpu_tutorial.lab.measure import largest_difference

COLUMN, BOX, TOP = 196, 30, 74  # pixels: width, height, and where the first box begins
Thing = torch.Tensor | nn.Module
Things = Mapping[str, Thing | Sequence[Thing]]


def eight_steps(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    devices: Devices,
) -> list[tuple[str, Things]]:
    """Take a training step of `DataParallel` in its eight parts.

    Returns the title of each part, and by name what there is after it; the first entry is
    before the step.
    """
    there: dict[str, Any] = {"batch": images, "labels": labels, "module": module}
    steps = [("0. before", dict(there))]

    def note_step(title: str, gone: Sequence[str] = (), **new: Any) -> None:
        for name in gone:
            del there[name]
        there.update(new)
        steps.append((title, dict(there)))

    optimizer.zero_grad()
    pieces = scatter(images, devices)
    note_step("1. scatter: the batch is cut", piece=pieces)
    replicas = replicate(module, devices[: len(pieces)])
    note_step("2. replicate: the module is copied", replica=replicas)
    copies = [p for replica in replicas for p in replica.parameters() if p.requires_grad]
    for parameter in copies:
        parameter.retain_grad()  # PyTorch keeps only the module's
    outputs = parallel_apply(replicas, [(piece,) for piece in pieces])
    note_step("3. parallel_apply: forward in threads", output=outputs)
    output = gather(outputs, devices[0])
    gone = ["output"]
    note_step("4. gather: all outputs to the first device", gone, gathered=output)
    copied = labels.to(devices[0])
    loss = cross_entropy(output, copied)
    note_step("5. loss, on the first device", **{"labels, copied": copied}, loss=loss)
    loss.backward()
    gone = ["piece", "gathered", "labels, copied", "loss"]
    gradients = [parameter.grad for parameter in copies]
    note_step("6. backward: a gradient for each replica", gone, gradient=gradients)
    gradients = [p.grad for p in module.parameters() if p.requires_grad]
    note_step("7. the gradients add up on the module", ["replica"], gradient=gradients)
    optimizer.step()
    note_step("8. update: only the module", module=module)
    return steps


def memory_of_step(
    net: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    devices: Devices,
    inside: bool = False,
) -> Ledger:
    """Take one step of SGD with momentum, the loss `inside` the module or not; count it."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = DataParallel(WithLoss(net) if inside else net, devices)
    ledger = Ledger()
    with ledger.saved_for_backward(model.module):
        gathered = model(images, labels) if inside else model(images)
    with ledger.saved_for_backward(name="kept by the loss"):
        loss = gathered.mean() if inside else cross_entropy(gathered, labels.to(devices[0]))
    ledger.add("gathered outputs", gathered)
    loss.backward()
    optimizer.step()
    ledger.record_state(net, optimizer)
    return ledger


def one_step(
    net: nn.Module, images: torch.Tensor, labels: torch.Tensor, devices: Devices
) -> dict[str, list[torch.Tensor]]:
    """Forward, loss and backward of a copy of `net` on the devices; returns CPU tensors."""
    net = copy.deepcopy(net).to(devices[0])
    output = DataParallel(net, devices)(images)
    cross_entropy(output, labels.to(devices[0])).backward()
    gradients = [parameter.grad.cpu() for parameter in net.parameters()]
    return {"outputs": [output.detach().cpu()], "gradients": gradients}


def four_and_one(
    net: nn.Module, images: torch.Tensor, labels: torch.Tensor, devices: Devices
) -> str:
    """How far a step on all devices is from one on the first, beside the largest number."""
    one, several = (one_step(net, images, labels, on) for on in (devices[:1], devices))
    words = []
    for key, expected in one.items():
        share = largest_difference(several[key], expected) / max(
            float(tensor.abs().max()) for tensor in expected
        )
        words.append(
            f"{key} differ by {'less than 0.001%' if share < 1e-5 else f'{share:.0%}'}"
        )
    return ", ".join(words)


# What lies on which device: a column per device, a box per tensor


class Item(NamedTuple):
    """A tensor or a module: its name, where it is, and its shape or its count of numbers."""

    name: str
    device: str
    shape: str


def placement(steps: Sequence[tuple[str, Things]]) -> Film:
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
    return Film(drawings)


def items_of(things: Things) -> list[Item]:
    """A row for each tensor or module; several of one name are numbered: "piece 0", …."""
    items, memories = [], set()
    for name, value in things.items():
        if isinstance(value, list | tuple) and len(value) > 1:
            items += [
                Item(f"{name} {i}", *_where(thing, memories)) for i, thing in enumerate(value)
            ]
        elif isinstance(value, list | tuple):
            items += [Item(name, *_where(thing, memories)) for thing in value]
        else:
            items.append(Item(name, *_where(value, memories)))
    return items


def _where(thing: Thing, memories: set[int]) -> tuple[str, str]:
    """The device and the shape; a module in the memory of an earlier one is a view."""
    if isinstance(thing, nn.Module):
        memory = next(thing.parameters()).data_ptr()
        count = f"{sum(p.numel() for p in thing.parameters()):,} numbers"
        shape = "a view" if memory in memories else count
        memories.add(memory)
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
        here = [item for item in items if item.device == device]
        words = [f"{'' if i in old else '+ '}{i.name} {i.shape}" for i in here]
        lines.append(f"  {device}: {', '.join(words) or 'nothing'}")
    return "\n".join(lines)
