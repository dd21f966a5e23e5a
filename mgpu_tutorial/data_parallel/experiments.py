"""What the notebook on DataParallel measures: networks, memory, threads, one experiment."""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.data_parallel.wrapper import (
    DataParallel,
    Devices,
    gather,
    parallel_apply,
    replicate,
    scatter,
)
from mgpu_tutorial.lab import Ledger
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.shared.data import pictures


class Loud(nn.Module):
    """Says which sizes its copy of the network sees, and on which device."""

    def __init__(self, net: nn.Module, say: Callable[[str], None]) -> None:
        super().__init__()
        self.net, self.say = net, say

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.net(x)
        self.say(f"inside  {x.device}: input {tuple(x.shape)}, output {tuple(y.shape)}")
        return y


def walk_through(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    devices: Devices,
) -> list[tuple[str, dict]]:
    """Take the eight steps and note after each what there is (for `placement`)."""
    there = {"batch": images, "module": net}
    steps = [("0. The batch is in main memory, the module on the first device", dict(there))]

    def after(title: str, new: dict, gone: Sequence[str] = ()) -> None:
        for name in [n for n in there if n.rstrip(" 0123456789") in gone]:
            del there[name]
        there.update(new)
        steps.append((title, dict(there)))

    def numbered(name: str, things: Sequence) -> dict:
        return {f"{name} {r}": thing for r, thing in enumerate(things)}

    pieces = scatter(images, devices)
    after("1. scatter: the batch is cut", numbered("piece", pieces))
    replicas = replicate(net, devices)
    after("2. replicate: the module is copied", numbered("replica", replicas))
    for replica in replicas:
        replica.weight.retain_grad()
    outputs = parallel_apply(replicas, pieces, devices)
    after("3. parallel_apply: forward in threads", numbered("output", outputs))
    output = gather(outputs, devices[0])
    after("4. gather: all outputs to the first device", {"outputs": output}, ["output"])
    loss = cross_entropy(output, labels.to(devices[0]))
    after("5. loss, on the first device", {"loss": loss})
    optimizer.zero_grad()
    loss.backward()
    gradients = [replica.weight.grad for replica in replicas]
    gone = ["piece", "outputs", "loss"]
    after("6. backward: a gradient a replica", numbered("gradient", gradients), gone)
    total = {"summed gradient": net.weight.grad}
    after("7. the gradients add up on the module", total, ["gradient", "replica"])
    optimizer.step()
    after("8. update: only the module", {"module": net})
    return steps


class PixelNet(nn.Module):
    """Says for each pixel of (N, 3, H, W) which of `classes` it is: (N, classes, H, W)."""

    def __init__(self, hidden: int = 16, classes: int = 20) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, hidden, 3, padding=1)
        self.norm = nn.BatchNorm2d(hidden)
        self.head = nn.Conv2d(hidden, classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(images))))


class WithLoss(nn.Module):
    """Computes the loss where the outputs are: every replica returns one number."""

    def __init__(self, module: nn.Module, reduction: str = "mean") -> None:
        super().__init__()
        self.module, self.reduction = module, reduction

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.module(images), labels, reduction=self.reduction)


class Counting(nn.Module):
    """Counts its calls in an attribute and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("calls_in_buffer", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.calls_in_buffer += 1
        return x


def ledger_of_step(
    net: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    devices: Devices,
    inside: bool = False,
) -> Ledger:
    """Take one step of SGD with momentum, the loss `inside` the module or not; book it."""
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


class Waiting(nn.Module):
    """Waits for 20 ms without the interpreter, as a thread waits for its GPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x


class Kernels(nn.Module):
    """Spends its time in one compiled operation after the other, without Python."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.tanh(x @ x)
        return x


class Interpreted(nn.Module):
    """Spends its time in Python, number by number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = 0.0
        for value in x.flatten().tolist():
            total = 0.5 * total + value * value
        return x.new_full((1,), total)


class Times(NamedTuple):
    """Seconds of all replicas in turn and in threads, and the cores that the threads used."""

    in_turn: float
    in_threads: float
    cores: float


def both_ways(
    module: nn.Module, x: torch.Tensor, devices: Devices, repeats: int = 5
) -> Times:
    """Run all replicas one after the other, then in threads; medians over the repeats."""
    pieces, replicas = scatter(x, devices), replicate(module, devices)
    runs = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for replica, piece in zip(replicas, pieces, strict=True):
            replica(piece)
        _synchronise(devices)
        middle, busy = time.perf_counter(), time.process_time()
        parallel_apply(replicas, pieces, devices)
        _synchronise(devices)
        seconds, busy = time.perf_counter() - middle, time.process_time() - busy
        runs.append((middle - begin, seconds, busy / seconds))
    return Times(*map(statistics.median, zip(*runs, strict=True)))


def _synchronise(devices: Devices) -> None:
    for device in devices:
        if device.type == "cuda":  # kernels run on after their launch returned
            torch.cuda.synchronize(device)


def phases(report: Report) -> dict[str, float]:
    """The shortest seconds of each phase over the recorded steps; forward is one phase."""
    found: dict[str, list[float]] = {}
    forward: list[Event] = []
    for event in report.events:
        if event.note == "3 forward":
            forward.append(event)
            continue
        if forward:
            seconds = max(e.end for e in forward) - min(e.begin for e in forward)
            found.setdefault("3 forward", []).append(seconds)
            forward = []
        found.setdefault(event.note, []).append(event.end - event.begin)
    return {name: min(found[name]) for name in sorted(found)}


# The experiment: MobileNetV2 on small pictures that are enlarged, batch 256 on 4 devices

BATCH, SIDE = 256, 112


def mobilenet(steps: int, device: torch.device | str = "cpu"):
    """MobileNetV2 for ten classes on `device`, SGD, and a cosine schedule over `steps`."""
    from mgpu_tutorial.shared.vision import torchvision  # seconds: only for who needs it

    net = torchvision.models.mobilenet_v2(num_classes=10).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    return net, optimizer, schedule


def train_mobilenet(
    devices: Devices, steps: int, batch: int = BATCH, side: int = SIDE
) -> list[tuple[float, float]]:
    """Train through DataParallel; returns (loss, learning rate) of each step."""
    data = pictures()
    net, optimizer, schedule = mobilenet(steps, devices[0])
    model = DataParallel(net, devices)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    history = []
    for step in range(steps):
        index = order[torch.arange(step * batch, (step + 1) * batch) % len(data)]
        images, labels = data.batch(index, side)
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels.to(devices[0]))
        loss.backward()
        history.append((loss.item(), schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
    return history


def kept_without_computing(batch: int, side: int) -> int:
    """Bytes that MobileNetV2 keeps for backward, from shapes alone: on the meta device."""
    net, _, _ = mobilenet(1, "meta")
    ledger = Ledger()
    with ledger.saved_for_backward(net):
        net(torch.empty(batch, 3, side, side, device="meta"))
    return ledger["meta"]["activations"]
