"""Apparatus, not the lesson: a film of what is where, and the bytes of a step."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.data_parallel import wrapper
from mgpu_tutorial.lab import Ledger
from mgpu_tutorial.lab.colours import tone_of
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.draw.film import Film

COLUMN, BOX, TOP = 196, 38, 74  # pixels: width, height, and where the first box begins
Steps = list[tuple[str, dict[str, Sequence[torch.Tensor]]]]


def eight_steps(
    module: nn.Linear,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    devices: wrapper.Devices,
) -> Steps:
    """Take a training step of `DataParallel` in its eight parts, with a layer without bias.

    Returns the title of each part, and by name the tensors that are there after it.
    """
    there, steps = {}, []

    def note(title: str, **changed: Sequence[torch.Tensor]) -> None:
        there.update(changed)
        steps.append((title, dict(there)))

    optimizer.zero_grad()
    note("0. before", batch=[images], labels=[labels], module=[module.weight])
    pieces = wrapper.scatter(images, devices)
    note("1. scatter: the batch is cut", piece=pieces)
    replicas = wrapper.replicate(module, devices[: len(pieces)])
    weights = [replica.weight for replica in replicas]
    note("2. replicate: the module is copied", replica=weights)
    outputs = wrapper.parallel_apply(replicas, [(piece,) for piece in pieces])
    note("3. parallel_apply: forward in threads", output=outputs)
    output = wrapper.gather(outputs, devices[0])
    note("4. gather: all outputs to the first device", output=[], gathered=[output])
    copied = {"labels, copied": [labels.to(devices[0])]}
    loss = cross_entropy(output, copied["labels, copied"][0])
    note("5. loss, on the first device", **copied, loss=[loss])
    [weight.retain_grad() for weight in weights]  # PyTorch keeps only the module's
    loss.backward()
    gone = dict.fromkeys(["piece", "gathered", *copied, "loss"], [])
    gradients = [weight.grad for weight in weights]
    note("6. backward: a gradient for each replica", gradient=gradients, **gone)
    note("7. the gradients add up on the module", replica=[], gradient=[module.weight.grad])
    optimizer.step()
    note("8. update: only the module")
    return steps


def placement(steps: Steps) -> Film:
    """A frame of each step, with a column for a device; what is new has a thick border."""
    frames = [(title, _items_of(things)) for title, things in steps]
    counts = [Counter(device for device, *_ in items) for _, items in frames]
    devices = sorted(set().union(*counts))
    size = COLUMN * len(devices) + 20, TOP + BOX * max(max(c.values()) for c in counts) + 8
    drawings, old = [], []
    for title, items in frames:
        drawing = Drawing(*size, title, title)
        drawing.label(14, 24, title, 15, anchor="start", weight="bold")
        for i, device in enumerate(devices):
            x, mine = 12 + COLUMN * i, [item for item in items if item[0] == device]
            drawing.box(x, 36, COLUMN - 10, size[1] - 40, FAINT, "#ffffff", 1)
            drawing.label(x + 10, 58, device, 14, tone_of(device).text, "start", "bold")
            words = []
            for y, (_, name, shape) in enumerate(mine):
                y, is_new = TOP + BOX * y, (device, name, shape) not in old
                look = (INK, "#ffffff", 2.4) if is_new else (FAINT, "#f2f2f2", 1)
                drawing.box(x + 6, y, COLUMN - 22, BOX - 8, *look)
                weight = "bold" if is_new else "normal"
                drawing.label(x + 14, y + 20, name, 14, INK, "start", weight)
                drawing.label(x + COLUMN - 22, y + 20, shape, 14, INK, "end")
                words.append(f"{'+ ' * is_new}{name} {shape}")
            drawing.text += f"\n  {device}: {', '.join(words) or 'nothing'}"
        drawings.append(drawing)
        old = items
    return Film(drawings)


def _items_of(things: dict[str, Sequence[torch.Tensor]]) -> list[tuple[str, str, str]]:
    """The device, name and shape of each tensor; those of a list are numbered."""
    items, memories = [], set()
    for name, tensors in things.items():
        for i, tensor in enumerate(tensors):
            shape = "×".join(map(str, tensor.shape)) or "scalar"
            shape = "a view" if tensor.data_ptr() in memories else shape
            memories.add(tensor.data_ptr())
            numbered = f"{name} {i}" if len(tensors) > 1 else name
            items.append((str(tensor.device), numbered, shape))
    return items


def memory_of_step(
    net: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    devices: wrapper.Devices,
    inside: bool = False,
) -> Ledger:
    """Take one step of SGD with momentum, the loss `inside` the module or not; count it."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = wrapper.DataParallel(wrapper.WithLoss(net) if inside else net, devices)
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
