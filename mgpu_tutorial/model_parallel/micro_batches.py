"""Micro-batches in one process: each device has a thread, and works on its own part.

A GPU has a stream, which Python fills and does not wait for. On the CPU a thread stands for
it here, so that two cores can stand for two devices.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class Task(NamedTuple):
    """What a device does at one time: `row` is its rank or number, times are in seconds."""

    begin: float
    end: float
    row: int
    stage: int
    kind: str  # F for forward, B for backward
    micro: int


def equal_parts(inputs: Tensor, targets: Tensor, micro: int) -> list[tuple[Tensor, Tensor]]:
    """The batch in `micro` equal parts, each with its inputs and its targets."""
    if len(inputs) % micro:
        raise ValueError(f"{len(inputs)} samples have no {micro} equal parts")
    return list(zip(inputs.chunk(micro), targets.chunk(micro), strict=True))


def labels_in(targets: Tensor) -> Tensor | int:
    """How many targets count in a mean: of whole numbers those that aren't -100."""
    return targets.numel() if targets.is_floating_point() else (targets != -100).sum()


class MicroBatchStep:
    """One training step of a model in stages: each device has a thread with a queue.

    `parts` are the micro-batches. `saved[s, i]` keeps input and output of stage s and
    micro-batch i until their backward.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        micro: int,
        loss_of: Callable = cross_entropy,  # the mean of a micro-batch
    ) -> None:
        self.model, self.saved, self.futures, self.tasks = model, {}, [], []
        self.loss_of = loss_of
        self.parts = equal_parts(images, labels, micro)
        self.threads = [ThreadPoolExecutor(1) for _ in model.stages]  # one for each device

    def queue(self, task: Callable, s: int, i: int, after: Future | None = None) -> Future:
        """Device s will call `task`, with the result of `after`; returns at once."""
        self.futures.append(self.threads[s].submit(self.call, task, s, i, after))
        return self.futures[-1]

    def call(self, task: Callable, s: int, i: int, after: Future | None) -> Tensor | None:
        """Wait for `after`, call `task`, and note for the chart when the device did it."""
        received = None if after is None else after.result()
        begin = time.perf_counter()
        passed_on = task(self, s, i, received)
        if self.model.devices[s].type == "cuda":  # a GPU works on after its call returned
            torch.cuda.synchronize(self.model.devices[s])
        kind = "F" if task is forward_stage else "B"
        self.tasks.append(Task(begin, time.perf_counter(), s, s, kind, i))
        return passed_on


def forward_stage(
    step: MicroBatchStep, s: int, i: int, output_before: Tensor | None
) -> Tensor:
    """Stage s takes the output of stage s - 1, or images; the last one returns the loss."""
    input_tensor, label = step.parts[i]
    if output_before is not None:  # a new leaf: its gradient is what stage s - 1 needs
        input_tensor = output_before.requires_grad_()
    device = step.model.devices[s]
    output_tensor = step.model.stages[s](input_tensor.to(device))
    if s == len(step.model.stages) - 1:
        loss = step.loss_of(output_tensor, label.to(device))
        output_tensor = loss / len(step.parts)
    step.saved[s, i] = input_tensor, output_tensor
    return output_tensor.detach()


def backward_stage(
    step: MicroBatchStep, s: int, i: int, output_tensor_grad: Tensor | None
) -> Tensor | None:
    """Stage s takes the gradient of its output, and returns that of its input."""
    input_tensor, output_tensor = step.saved.pop((s, i))
    if output_tensor.requires_grad:  # not if the first stage has nothing to train
        output_tensor.backward(output_tensor_grad)
    return input_tensor.grad


def forward_backward(step: MicroBatchStep) -> None:
    """Stage s works on one micro-batch while stage s + 1 works on the one before."""
    stages = range(len(step.model.stages))
    micro_batches = range(len(step.parts))
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
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    micro: int,
    order: Callable = forward_backward,
    loss_of: Callable = cross_entropy,
) -> list[Task]:
    """One training step, which `order` puts into the queues; what each device did when.

    `loss_of` takes the output and the targets of a micro-batch, and gives their mean loss.
    `no_grad` and autocast around the call do not reach the threads that compute. Not
    general: `prove` it on your model.
    """
    step = MicroBatchStep(model, images, labels, micro, loss_of)
    order(step)
    for future in step.futures:
        future.result()  # waits for the task, and raises here what it raised
    return step.tasks
