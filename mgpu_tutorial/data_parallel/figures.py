"""Apparatus, not the lesson: where things are after each step, bytes, one step's results."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.data_parallel.wrapper import (
    DataParallel,
    Devices,
    WithLoss,
    gather,
    parallel_apply,
    replicate,
    scatter,
)
from mgpu_tutorial.lab import Ledger
from mgpu_tutorial.lab.colours import tone_of
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.draw.film import Film
from mgpu_tutorial.lab.measure import largest_difference

COLUMN, BOX, TOP = 196, 30, 74  # pixels: width, height, and where the first box begins
Thing = torch.Tensor | nn.Module
Things = Mapping[str, Thing | Sequence[Thing]]
Item = tuple[str, str, str]  # a name, a device, and a shape or a count of numbers


def eight_steps(
    module: nn.Linear,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    devices: Devices,
) -> list[tuple[str, Things]]:
    """Take a training step of `DataParallel` in its eight parts, with a layer without bias.

    Returns the title of each part, and by name what there is after it; the first entry is
    before the step.
    """
    optimizer.zero_grad()
    pieces = scatter(images, devices)
    replicas = replicate(module, devices[: len(pieces)])
    for replica in replicas:
        replica.weight.retain_grad()  # PyTorch keeps only the module's
    outputs = parallel_apply(replicas, [(piece,) for piece in pieces])
    output = gather(outputs, devices[0])
    copied = labels.to(devices[0])
    loss = cross_entropy(output, copied)
    loss.backward()
    gradients = [replica.weight.grad for replica in replicas]
    optimizer.step()
    gone = dict.fromkeys(["piece", "gathered", "labels, copied", "loss"])
    changes = {
        "0. before": {"batch": images, "labels": labels, "module": module},
        "1. scatter: the batch is cut": {"piece": pieces},
        "2. replicate: the module is copied": {"replica": replicas},
        "3. parallel_apply: forward in threads": {"output": outputs},
        "4. gather: all outputs to the first device": {"output": None, "gathered": output},
        "5. loss, on the first device": {"labels, copied": copied, "loss": loss},
        "6. backward: a gradient for each replica": gone | {"gradient": gradients},
        "7. the gradients add up on the module": {
            "replica": None,
            "gradient": module.weight.grad,
        },
        "8. update: only the module": {},
    }
    there, steps = {}, []
    for title, changed in changes.items():
        there |= changed
        steps.append((title, {name: th for name, th in there.items() if th is not None}))
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


def four_and_one(
    net: nn.Module, images: torch.Tensor, labels: torch.Tensor, devices: Devices
) -> str:
    """How far a step on all devices is from one on the first, beside the largest number."""
    found = []
    for on in (devices[:1], devices):
        copied = copy.deepcopy(net).to(devices[0])
        output = DataParallel(copied, on)(images)
        cross_entropy(output, labels.to(devices[0])).backward()
        found.append([[output.detach().cpu()], [p.grad.cpu() for p in copied.parameters()]])
    words = []
    for name, one, several in zip(("outputs", "gradients"), *found, strict=True):
        largest = max(float(tensor.abs().max()) for tensor in one)
        share = largest_difference(several, one) / largest
        words.append(
            f"{name} differ by {'less than 0.001%' if share < 1e-5 else f'{share:.0%}'}"
        )
    return ", ".join(words)


# What lies on which device: a column per device, a box per tensor


def placement(steps: Sequence[tuple[str, Things]]) -> Film:
    """Make a frame of each step: its title, and all that is there after it.

    What is new has a thick border, what was there before a thin one.
    """
    frames = [(title, _items_of(things)) for title, things in steps]
    on = [Counter(device for _, device, _ in items) for _, items in frames]
    devices = sorted(set().union(*on))
    most = max(max(count.values()) for count in on)
    drawings, old = [], []
    for title, items in frames:
        drawings.append(_frame(title, items, old, devices, most))
        old = items
    return Film(drawings)


def _items_of(things: Things) -> list[Item]:
    """An item for each tensor or module; those of a list are numbered: "piece 0", …."""
    named = {}
    for name, value in things.items():
        several = enumerate(value) if isinstance(value, list) else []
        named |= {f"{name} {i}": thing for i, thing in several} or {name: value}
    items, memories = [], set()
    for name, thing in named.items():
        tensor = next(thing.parameters()) if isinstance(thing, nn.Module) else thing
        shape = "×".join(map(str, getattr(thing, "shape", ()))) or "scalar"
        if thing is not tensor:  # a module in the memory of an earlier one is a view
            count = f"{sum(p.numel() for p in thing.parameters()):,} numbers"
            shape = "a view" if tensor.data_ptr() in memories else count
            memories.add(tensor.data_ptr())
        items.append((name, str(tensor.device), shape))
    return items


def _frame(
    title: str, items: list[Item], old: list[Item], devices: list[str], most: int
) -> Drawing:
    lines = [title]
    for device in devices:
        words = [
            f"{'' if item in old else '+ '}{item[0]} {item[2]}"
            for item in items
            if item[1] == device
        ]
        lines.append(f"  {device}: {', '.join(words) or 'nothing'}")
    height = TOP + (BOX + 8) * most + 8
    drawing = Drawing(COLUMN * len(devices) + 20, height, "\n".join(lines), title)
    drawing.label(14, 24, title, 15, anchor="start", weight="bold")
    for i, device in enumerate(devices):
        x = 12 + COLUMN * i
        drawing.box(x, 36, COLUMN - 10, height - 40, FAINT, "#ffffff", 1)
        drawing.label(x + 10, 58, device, 14, tone_of(device).text, "start", "bold")
        for row, item in enumerate(item for item in items if item[1] == device):
            y, is_new = TOP + (BOX + 8) * row, item not in old
            border = (INK, "#ffffff", 2.4) if is_new else (FAINT, "#f2f2f2", 1)
            drawing.box(x + 6, y, COLUMN - 22, BOX, *border)
            weight = "bold" if is_new else "normal"
            drawing.label(x + 14, y + 20, item[0], 14, INK, "start", weight)
            drawing.label(x + COLUMN - 22, y + 20, item[2], 14, INK, "end")
    return drawing
