"""Micro-batches in one process: each device has a thread, and works on its own part.

A GPU has a stream, which Python fills and does not wait for. On the CPU a thread stands for
it here, so that two cores can stand for two devices.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.model_parallel.chart import Task


class MicroBatchStep:
    """One training step of a model in stages, with a thread for each device.

    `parts` are the micro-batches, all as large: the mean of others is not that of the batch.
    `saved[s, i]` keeps input and output of stage s and micro-batch i from their forward to
    their backward. `tasks` notes for the chart what each device did when.
    """

    clock = staticmethod(time.perf_counter)

    def __init__(
        self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor, micro: int
    ) -> None:
        self.model = model
        equal = (whole.unflatten(0, (micro, -1)) for whole in (images, labels))
        self.parts = list(zip(*equal, strict=True))
        self.threads = [ThreadPoolExecutor(1) for _ in model.stages]  # one for each device
        self.saved: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.losses: list[torch.Tensor] = []
        self.futures: list[Future] = []
        self.tasks: list[Task] = []

    def queue(self, task: Callable, s: int, i: int, after: Future | None = None) -> Future:
        """Device s will call `task`, with the result of `after`; returns at once."""
        self.futures.append(self.threads[s].submit(self.call, task, s, i, after))
        return self.futures[-1]

    def call(
        self, task: Callable, s: int, i: int, after: Future | None
    ) -> torch.Tensor | None:
        received = None if after is None else after.result()  # waits until there is one
        begin = self.clock()
        passed_on = task(self, s, i, received)
        if self.model.devices[s].type == "cuda":  # a GPU works on after its call returned
            torch.cuda.synchronize(self.model.devices[s])
        kind = {forward_stage: "F", backward_stage: "B"}[task]
        self.tasks.append(Task(s, s, kind, i, begin, self.clock()))
        return passed_on

    def finish(self) -> None:
        """Wait until the queues are empty, and raise here what a task raised."""
        for thread in self.threads:
            thread.shutdown()
        for future in self.futures:
            future.result()


def forward_stage(
    step: MicroBatchStep, s: int, i: int, output_before: torch.Tensor | None
) -> torch.Tensor:
    """Stage s takes the output of stage s - 1, or images; the last one returns the loss."""
    input_tensor, label = step.parts[i]
    if output_before is not None:  # a new leaf: its gradient is what stage s - 1 needs
        input_tensor = output_before.requires_grad_()
    device = step.model.devices[s]
    output_tensor = step.model.stages[s](input_tensor.to(device))
    if s == len(step.model.stages) - 1:
        loss = cross_entropy(output_tensor, label.to(device))
        output_tensor = loss / len(step.parts)
        step.losses.append(output_tensor.detach())
    step.saved[s, i] = input_tensor, output_tensor
    return output_tensor.detach()


def backward_stage(
    step: MicroBatchStep, s: int, i: int, output_tensor_grad: torch.Tensor | None
) -> torch.Tensor | None:
    """Stage s takes the gradient of its output, and returns that of its input."""
    input_tensor, output_tensor = step.saved.pop((s, i))
    output_tensor.backward(output_tensor_grad)
    return input_tensor.grad


def forward_backward(step: MicroBatchStep) -> None:
    """Stage s works on one micro-batch while stage s + 1 works on the one before."""
    stages, micro_batches = range(len(step.model.stages)), range(len(step.parts))
    # all forwards: each waits for the same micro-batch on the stage before
    for i in micro_batches:
        task = None
        for s in stages:
            task = step.queue(forward_stage, s, i, after=task)
    # all backwards: from the last stage to the first
    for i in micro_batches:
        task = None
        for s in reversed(stages):
            task = step.queue(backward_stage, s, i, after=task)


def take_step(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, micro: int
) -> tuple[float, list[Task]]:
    """One training step; returns the mean loss, and what each device did when."""
    step = MicroBatchStep(model, images, labels, micro)
    forward_backward(step)
    step.finish()
    return sum(step.losses).item(), step.tasks
