"""One training step of a split model by the clock: which device computes when."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.model_parallel.micro_batches import Task


def now(devices: Sequence) -> float:
    """Seconds, when the GPUs among `devices` have done what they were given."""
    for device in map(torch.device, devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter()


def timed_step(model: nn.Module, images: Tensor, labels: Tensor) -> list[Task]:
    """Forward and backward of the whole batch; each stage's times on its device."""
    devices, x = model.devices, images
    outputs, gradients = [now(devices)], []
    for stage, device in zip(model.stages, devices, strict=True):
        x = stage(x.to(device))
        outputs.append(now(devices))
        # called when the gradient of this output is there
        x.register_hook(lambda _: gradients.insert(0, now(devices)))
    cross_entropy(x, labels.to(device)).backward()
    gradients.insert(0, now(devices))
    tasks = []
    for s, device in enumerate(devices):
        row = devices.index(device)
        tasks.append(Task(outputs[s], outputs[s + 1], row, s, "F", 0))
        tasks.append(Task(gradients[s + 1], gradients[s], row, s, "B", 0))
    return sorted(tasks)
