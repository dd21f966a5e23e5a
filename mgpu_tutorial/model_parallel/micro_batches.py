"""Micro-batches in one process: each device has a thread, and works on its own part.

A GPU has a stream, which Python fills and does not wait for. On the CPU a thread stands for
it here, so that two cores can stand for two devices.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab.record.pipeline_steps import Task
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


def forward_backward(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, micro: int
) -> tuple[float, list[Task]]:
    """Stage s works on one micro-batch while stage s + 1 works on the one before.

    Each device has a thread that works off its tasks in order, as a GPU works off its
    stream. The gradients add up in .grad; returns the mean loss, and what each device did
    when. Raises ValueError where the batch does not divide into `micro` equal parts.
    """
    parts, last = split(images, labels, micro), len(model.stages) - 1
    saved: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    tasks: list[Task] = []

    def forward(s: int, i: int, before: Future | None) -> torch.Tensor:
        input_tensor, label = parts[i]
        if before is not None:  # a new leaf: its gradient is what stage s - 1 waits for
            input_tensor = before.result().requires_grad_()
        with recorded(tasks, model.devices[s], "F", s, i):
            output_tensor = model.stages[s](input_tensor.to(model.devices[s]))
            if s == last:
                label = label.to(output_tensor.device)
                output_tensor = cross_entropy(output_tensor, label) / micro
        saved[s, i] = input_tensor, output_tensor
        return output_tensor.detach()

    def backward(s: int, i: int, after: Future | None) -> torch.Tensor | None:
        output_tensor_grad = None if after is None else after.result()
        input_tensor, output_tensor = saved.pop((s, i))
        with recorded(tasks, model.devices[s], "B", s, i):
            output_tensor.backward(output_tensor_grad)
        return input_tensor.grad

    threads = [ThreadPoolExecutor(1) for _ in model.stages]  # one for each device
    losses, ends = [], []
    for i in range(micro):
        task = None
        for s, thread in enumerate(threads):
            task = thread.submit(forward, s, i, task)
        losses.append(task)
    for i in range(micro):
        task = None
        for s, thread in reversed(list(enumerate(threads))):
            task = thread.submit(backward, s, i, task)
        ends.append(task)
    for thread in threads:
        thread.shutdown()
    for task in [*losses, *ends]:
        task.result()  # raises here what a task raised
    return sum(loss.result().item() for loss in losses), tasks


@contextmanager
def recorded(
    tasks: list[Task], device: torch.device, kind: str, s: int, i: int
) -> Iterator[None]:
    """Note when this block, the F or B of micro-batch i on stage s, began and ended."""
    begin = time.perf_counter()
    yield
    if device.type == "cuda":  # a GPU works on after its call returned
        torch.cuda.synchronize(device)
    tasks.append(Task(s, s, kind, i, begin, time.perf_counter()))
