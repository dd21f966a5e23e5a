"""Only measures: where things are after each step, bytes, seconds, distances of results."""

import copy
import statistics
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.data_parallel.checks import Devices
from mgpu_tutorial.data_parallel.experiments import WithLoss, mobilenet
from mgpu_tutorial.data_parallel.wrapper import (
    DataParallel,
    parallel_apply,
    replicate,
    scatter,
)
from mgpu_tutorial.lab import Ledger
from mgpu_tutorial.lab.draw.placement import Things
from mgpu_tutorial.lab.record.report import Report


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


class Times(NamedTuple):
    """Seconds of all replicas in turn and in threads, and the cores that the threads used."""

    in_turn: float
    in_threads: float
    cores: float


def time_in_turn_and_in_threads(
    module: nn.Module, x: torch.Tensor, devices: Devices, repeats: int = 5
) -> Times:
    """Run all replicas one after the other, then in threads; medians over the repeats."""
    pieces, replicas = scatter(x, devices), replicate(module, devices)
    runs = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for replica, piece in zip(replicas, pieces, strict=True):
            replica(piece)
        wait_for_kernels(devices)
        in_turn = time.perf_counter() - begin

        begin, begin_busy = time.perf_counter(), time.process_time()
        parallel_apply(replicas, pieces, devices)
        wait_for_kernels(devices)
        in_threads = time.perf_counter() - begin
        busy = time.process_time() - begin_busy
        runs.append(Times(in_turn, in_threads, cores=busy / in_threads))
    return Times(*map(statistics.median, zip(*runs, strict=True)))


def wait_for_kernels(devices: Devices) -> None:
    """Wait until the GPUs have done what they were given: a launch returns before that."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def phase_seconds(report: Report) -> dict[str, float]:
    """The shortest seconds of each phase over the recorded steps.

    Events of one name that follow each other are one phase, from the first beginning to the
    last end: so are the forwards of all threads.
    """
    found: dict[str, list[float]] = {}
    for name, group in groupby(report.events, key=lambda event: event.note):
        events = list(group)
        seconds = max(e.end for e in events) - min(e.begin for e in events)
        found.setdefault(name, []).append(seconds)
    return {name: min(found[name]) for name in sorted(found)}


def saved_bytes_from_shapes(batch: int, side: int) -> int:
    """Bytes that autograd keeps of MobileNetV2, from shapes alone: on the meta device."""
    net, _, _ = mobilenet(1, "meta")
    ledger = Ledger()
    with ledger.saved_for_backward(net):
        net(torch.empty(batch, 3, side, side, device="meta"))
    return ledger["meta"]["activations"]
