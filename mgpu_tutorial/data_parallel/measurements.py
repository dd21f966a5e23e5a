"""Only measures: where things are after each step, bytes, distances of results."""

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.data_parallel.checks import Devices
from mgpu_tutorial.data_parallel.experiments import WithLoss, mobilenet
from mgpu_tutorial.data_parallel.wrapper import (
    DataParallel,
    gather,
    gradients,
    parallel_apply,
    replicate,
    scatter,
)
from mgpu_tutorial.lab import Ledger, span
from mgpu_tutorial.lab.draw.placement import Things


class NoteStep(Protocol):
    """Who is told after each of the eight steps what is new and what is gone."""

    def __call__(self, title: str, /, gone: Sequence[str] = (), **new: Any) -> None: ...


def take_no_notes(title: str, /, gone: Sequence[str] = (), **new: Any) -> None:
    """The `note_step` of those who only want to train."""


def eight_steps(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    devices: Devices,
    note_step: NoteStep = take_no_notes,
) -> float:
    """A training step of `DataParallel`, each part of it told; returns the loss."""
    optimizer.zero_grad()
    with span("1 scatter"):
        pieces = scatter(images, devices)
        devices = devices[: len(pieces)]
    note_step("1. scatter: the batch is cut", piece=pieces)
    with span("2 replicate"):
        replicas = replicate(module, devices)
    note_step("2. replicate: the module is copied", replica=replicas)
    outputs = parallel_apply(replicas, pieces, devices)  # notes its own times, per thread
    note_step("3. parallel_apply: forward in threads", output=outputs)
    with span("4 gather"):
        output = gather(outputs, devices[0])
    note_step("4. gather: all outputs to the first device", ["output"], gathered=output)
    with span("5 loss"):
        loss = cross_entropy(output, labels.to(devices[0]))
    note_step("5. loss, on the first device", loss=loss)
    with span("6+7 backward"):  # back to every replica, and summed on the module
        loss.backward()
    gone = ["piece", "gathered", "loss"]
    note_step("6. backward: a gradient for each replica", gone, gradient=gradients(*replicas))
    gone = ["replica"]
    note_step("7. the gradients add up on the module", gone, gradient=gradients(module))
    with span("8 update"):
        optimizer.step()
    note_step("8. update: only the module", module=module)
    return loss.item()


class StepRecorder:
    """Is told of each of the eight steps, and keeps what there is after it for `placement`.

    `there` is what there is before the first step. Replicas are asked to retain their
    gradients, which PyTorch throws away otherwise.
    """

    def __init__(self, title: str, **there: Any) -> None:
        self._there: dict[str, Any] = there
        self.steps: list[tuple[str, Things]] = [(title, dict(there))]

    def __call__(self, title: str, /, gone: Sequence[str] = (), **new: Any) -> None:
        for name in gone:
            del self._there[name]
        self._there.update(new)
        self.steps.append((title, dict(self._there)))
        for replica in new.get("replica", []):
            for parameter in replica.parameters():
                if parameter.requires_grad:
                    parameter.retain_grad()


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
    loss = cross_entropy(output, labels.to(devices[0]))
    loss.backward()
    buffers = dict(net.named_buffers())
    found = {
        "outputs": [output],
        "loss": [loss],
        "gradients": [parameter.grad for parameter in net.parameters()],
        "running mean": [b for name, b in buffers.items() if name.endswith("_mean")],
        "running variance": [b for name, b in buffers.items() if name.endswith("_var")],
    }
    return {name: [t.detach().cpu() for t in tensors] for name, tensors in found.items()}


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """The largest difference between two lists of tensors, in shares of b's largest value."""
    gap = max(((x - y).abs().max().item() for x, y in zip(a, b, strict=True)), default=0.0)
    largest = max((y.abs().max().item() for y in b), default=0.0)
    return gap / largest if largest else gap


def saved_bytes_from_shapes(batch: int, side: int) -> int:
    """Bytes that autograd keeps of MobileNetV2, from shapes alone: on the meta device."""
    net, _, _ = mobilenet(1, "meta")
    ledger = Ledger()
    with ledger.saved_for_backward(net):
        net(torch.empty(batch, 3, side, side, device="meta"))
    return ledger["meta"]["activations"]
