"""Micro-batches in one process: each device has a thread, and works on its own part.

A GPU has a stream, which Python fills and does not wait for. On the CPU a thread stands for
it here, so that two cores can stand for two devices.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.model_parallel.tasks import Task


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


class MicroBatchStep:
    """One training step of a model in stages.

    `parts` are the micro-batches. `saved[s, i]` keeps input and output of stage s and
    micro-batch i from their forward to their backward. `tasks` notes what each device did
    when, by `clock`.
    """

    def __init__(
        self,
        model: nn.Module,
        images: torch.Tensor,
        labels: torch.Tensor,
        micro: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model, self.clock = model, clock
        self.parts = split(images, labels, micro)
        self.saved: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.tasks: list[Task] = []

    @contextmanager
    def recorded(self, kind: str, s: int, i: int) -> Iterator[torch.device]:
        """Note as a task what the block does: F or B of stage s on micro-batch i."""
        device, begin = self.model.devices[s], self.clock()
        yield device
        if device.type == "cuda":  # a GPU works on after its call returned
            torch.cuda.synchronize(device)
        self.tasks.append(Task(s, s, kind, i, begin, self.clock()))


def forward_stage(
    step: MicroBatchStep, s: int, i: int, output_before: torch.Tensor | None = None
) -> torch.Tensor:
    """Stage s takes the output of stage s - 1, or images; the last one returns the loss."""
    input_tensor, label = step.parts[i]
    if output_before is not None:  # a new leaf: its gradient is what stage s - 1 needs
        input_tensor = output_before.requires_grad_()
    with step.recorded("F", s, i) as device:
        output_tensor = step.model.stages[s](input_tensor.to(device))
        if s == len(step.model.stages) - 1:
            loss = cross_entropy(output_tensor, label.to(device))
            output_tensor = loss / len(step.parts)
    step.saved[s, i] = input_tensor, output_tensor
    return output_tensor.detach()


def backward_stage(
    step: MicroBatchStep, s: int, i: int, output_tensor_grad: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Stage s takes the gradient of its output, and returns that of its input."""
    input_tensor, output_tensor = step.saved.pop((s, i))
    with step.recorded("B", s, i):
        output_tensor.backward(output_tensor_grad)
    return input_tensor.grad


def forward_backward(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, micro: int
) -> tuple[float, list[Task]]:
    """Stage s works on one micro-batch while stage s + 1 works on the one before.

    Returns the mean loss, and what each device did when. Raises ValueError where the batch
    does not divide into `micro` equal parts.
    """
    step = MicroBatchStep(model, images, labels, micro)
    threads = [ThreadPoolExecutor(1) for _ in model.stages]  # one for each device
    losses, ends = [], []
    # all forwards: each task waits for the same micro-batch on the stage before
    for i in range(micro):
        task = None
        for s, thread in enumerate(threads):
            task = thread.submit(after, task, forward_stage, step, s, i)
        losses.append(task)
    # all backwards: from the last stage to the first
    for i in range(micro):
        task = None
        for s, thread in reversed(list(enumerate(threads))):
            task = thread.submit(after, task, backward_stage, step, s, i)
        ends.append(task)
    for thread in threads:
        thread.shutdown()
    for task in [*losses, *ends]:
        task.result()  # raises here what a task raised
    return sum(loss.result().item() for loss in losses), step.tasks


def after(
    task: Future | None, action: Callable, step: MicroBatchStep, s: int, i: int
) -> torch.Tensor | None:
    """Call `action` with the result of `task`, once there is one."""
    if task is None:
        return action(step, s, i)
    return action(step, s, i, task.result())
