"""Micro-batches in one process: each device has a queue, and works on its own part.

On a GPU the queue is the device's stream. On the CPU it is a thread here, so that two
cores can stand for two devices.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab.draw.pipeline_chart import Task, seconds
from mgpu_tutorial.lab.simulate.devices import as_device


def split(
    images: torch.Tensor, labels: torch.Tensor, micro: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`micro` equal micro-batches; ValueError where the batch does not divide."""
    batch = len(images)
    if micro < 1 or batch % micro:
        fit = ", ".join(str(m) for m in range(1, batch + 1) if batch % m == 0)
        raise ValueError(
            f"a batch of {batch} does not divide into {micro} equal micro-batches, and the "
            f"mean of unequal ones is not the mean of the batch. Use {fit}."
        )
    return list(zip(images.chunk(micro), labels.chunk(micro), strict=True))


class ConvStack(nn.Module):
    """Equal convolutions, as many on each device, where only the schedule is the point."""

    def __init__(
        self, devices: Sequence[torch.device | str], depth: int = 4, channels: int = 32
    ) -> None:
        super().__init__()
        widths = [3] + [channels] * depth * len(devices)
        layers = [
            nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.ReLU())
            for before, after in pairwise(widths)
        ]
        layers[-1].extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)])
        self.layers, self.devices = nn.ModuleList(layers), list(map(as_device, devices))
        self.stages = [
            nn.Sequential(*layers[depth * s : depth * (s + 1)]).to(device)
            for s, device in enumerate(devices)
        ]


def micro_batched(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, micro: int
) -> tuple[float, list[Task]]:
    """Stage s works on one micro-batch while stage s + 1 works on the one before.

    Each device has a queue that works off its tasks in order, as a GPU's stream does. The
    gradients add up in .grad; returns the mean loss, and what each device did when.
    """
    step = _Step(model, split(images, labels, micro))
    queues = [ThreadPoolExecutor(1) for _ in model.stages]
    done: dict[tuple[str, int, int], Future] = {}
    for i in range(micro):
        for s, queue in enumerate(queues):
            before = done.get(("F", s - 1, i))
            done["F", s, i] = queue.submit(step.forward, s, i, before)
    for i in range(micro):
        for s, queue in reversed(list(enumerate(queues))):
            after = done.get(("B", s + 1, i))
            done["B", s, i] = queue.submit(step.backward, s, i, after)
    for queue in queues:
        queue.shutdown()
    for future in done.values():
        future.result()  # raises here what a task raised
    return step.loss, step.tasks


class _Step:
    """What the stages of one step hand to each other, and keep until their backward."""

    def __init__(self, model: nn.Module, parts: list[tuple[torch.Tensor, torch.Tensor]]):
        self.model, self.parts, self.loss = model, parts, 0.0
        self.kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.tasks: list[Task] = []

    def forward(self, s: int, i: int, before: Future | None) -> torch.Tensor:
        x, labels = self.parts[i]
        if before is not None:  # a new leaf: its gradient is what stage s - 1 waits for
            x = before.result().detach().requires_grad_()
        with self._task("F", s, i):
            out = self.model.stages[s](x.to(self.model.devices[s]))
            if s == len(self.model.stages) - 1:
                out = cross_entropy(out, labels.to(out.device)) / len(self.parts)
                self.loss += out.item()
        self.kept[s, i] = x, out
        return out

    def backward(self, s: int, i: int, after: Future | None) -> torch.Tensor | None:
        gradient = after.result() if after is not None else None
        x, out = self.kept.pop((s, i))
        with self._task("B", s, i):
            out.backward(gradient)
        return x.grad

    @contextmanager
    def _task(self, kind: str, s: int, i: int) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if self.model.devices[s].type == "cuda":
            torch.cuda.synchronize(self.model.devices[s])
        self.tasks.append(Task(s, s, kind, i, begin, time.perf_counter()))


def sweep(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    micros: Sequence[int],
    repeats: int = 5,
) -> dict[int, list[float]]:
    """Seconds of a step for each number of micro-batches, all in turns, `repeats` times."""
    times: dict[int, list[float]] = {micro: [] for micro in micros}
    for _ in range(repeats):
        for micro in micros:
            model.zero_grad()
            times[micro].append(seconds(micro_batched(model, images, labels, micro)[1]))
    return times
