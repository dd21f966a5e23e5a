"""Apparatus, not the lesson: what each cut of ResNet-50 costs, and when a device is at work.

Memory, work and bytes follow from shapes: the network runs on PyTorch's meta device, which
computes nothing (https://docs.pytorch.org/docs/2.13/meta.html).
"""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mgpu_tutorial.lab import Ledger, Table, devices
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.words import bytes_text
from mgpu_tutorial.model_parallel.micro_batches import (
    MicroBatchStep,
    forward_backward,
    take_step,
)
from mgpu_tutorial.model_parallel.resnet_cuts import UNITS, cut_units, units
from mgpu_tutorial.model_parallel.split_resnet import ModelParallelResNet50, unsplit_step
from mgpu_tutorial.model_parallel.tasks import Task, duration
from mgpu_tutorial.shared.vision import torchvision

SGD_BYTES = 12  # a parameter in training: weight, gradient and momentum, float32 each


class Unit(NamedTuple):
    """What one unit, or one stage, needs for one batch.

    `flops` counts the operations of its forward, `saved` has the bytes of each storage that
    autograd keeps for its backward, and `output_bytes` are sent if a cut follows.
    """

    parameters: int
    flops: int
    saved: Mapping[object, int]
    output_bytes: int

    @property
    def activation_bytes(self) -> int:
        return sum(self.saved.values())

    @property
    def memory(self) -> int:
        """Bytes in training, with SGD and momentum."""
        return SGD_BYTES * self.parameters + self.activation_bytes


@functools.cache
def measure(batch: int = 4, image_size: int = 64) -> dict[str, Unit]:
    """The units of ResNet-50 for a batch of square images, in the order of its forward."""
    with torch.device("meta"):
        model = torchvision.models.resnet50()
        x = torch.empty(batch, 3, image_size, image_size)
    measured = {}
    for name, unit in units(model).items():
        ledger = Ledger()
        with ledger.saved_for_backward(unit), FlopCounterMode(display=False) as flops:
            x = unit(x)
        parameters = sum(p.numel() for p in unit.parameters())
        saved = ledger.storages("activations")
        measured[name] = Unit(parameters, flops.get_total_flops(), saved, x.nbytes)
        x = x.detach().requires_grad_()
    return measured


def stage_costs(measured: Mapping[str, Unit], cuts: Sequence[str]) -> list[Unit]:
    """What each stage needs, if a new one begins at each unit that `cuts` names.

    A stage's input counts as its own: on another device it is a copy.
    """
    costs = []
    for names in cut_units(cuts):
        stage = [measured[name] for name in names]
        saved = {key: nbytes for unit in stage for key, nbytes in unit.saved.items()}
        parameters, flops = (sum(column) for column in list(zip(*stage, strict=True))[:2])
        costs.append(Unit(parameters, flops, saved, stage[-1].output_bytes))
    return costs


def most_work(measured: Mapping[str, Unit], cuts: Sequence[str]) -> float:
    """The share of all work that the busiest stage has."""
    work = [stage.flops for stage in stage_costs(measured, cuts)]
    return max(work) / sum(work)


def best_cuts(measured: Mapping[str, Unit]) -> dict[str, str]:
    """The best single cut for each aim: the smallest worst device, or the fewest bytes."""
    pairs = {name: stage_costs(measured, [name]) for name in UNITS[1:]}
    return {
        "memory": min(pairs, key=lambda name: max(stage.memory for stage in pairs[name])),
        "balance": min(pairs, key=lambda name: max(stage.flops for stage in pairs[name])),
        "traffic": min(pairs, key=lambda name: pairs[name][0].output_bytes),
    }


def best_table(*batches: tuple[int, int]) -> Table:
    """The best cut for each aim, by size of the batch and of the images."""
    best = [(*batch, *best_cuts(measure(*batch)).values()) for batch in batches]
    return Table(["batch", "image size", "memory", "balance", "traffic"], best)


def cut_table(measured: Mapping[str, Unit]) -> Table:
    """A row for each possible cut into two: parameters, activations, work, bytes sent."""
    rows = []
    for name in UNITS[1:]:
        pair = first, second = stage_costs(measured, [name])
        row = [name, *(f"{stage.parameters / 1e6:.1f} M" for stage in pair)]
        row += [bytes_text(stage.activation_bytes) for stage in pair]
        row += [bytes_text(max(first.memory, second.memory))]
        row += [f"{first.flops / (first.flops + second.flops):.0%}"]
        rows.append([*row, bytes_text(first.output_bytes)])
    header = ["cut before", "parameters 0", "1", "activations 0", "1"]
    return Table([*header, "fuller device", "work 0", "sends"], rows)


def steps_alone(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, micros: Sequence[int]
) -> dict[int, list[Task]]:
    """Steps as devices that share nothing would run them, by number of micro-batches.

    Their tasks are computed one after the other, each timed by the processor's clock, which
    stands still while other programs run (on a GPU by the usual one), and then laid out.
    Returns the shortest of three.
    """
    on_gpu = any(device.type == "cuda" for device in model.devices)
    steps: dict[int, list[list[Task]]] = defaultdict(list)
    for micro in [*micros] * 3:
        step = MicroBatchStep(model, images, labels, micro)
        step.clock = time.perf_counter if on_gpu else time.process_time
        step.queue = functools.partial(_at_once, step)
        forward_backward(step)
        steps[micro].append(lay_out(step.tasks))
    return {micro: min(taken, key=duration) for micro, taken in steps.items()}


def _at_once(
    step: MicroBatchStep, task: Callable, s: int, i: int, after: Future | None
) -> Future:
    done = Future()
    done.set_result(step.call(task, s, i, after))
    return done


def lay_out(tasks: Iterable[Task]) -> list[Task]:
    """Begin each task as soon as its row is free and what it waits for is done.

    F waits for F of the stage before, B for B of the stage behind; in `tasks` no task stands
    before the one that it waits for.
    """
    free: dict[int, float] = defaultdict(float)  # when each row ends its latest task
    done: dict[tuple[str, int, int], float] = {}
    placed = []
    for task in tasks:
        neighbour = task.stage - 1 if task.kind == "F" else task.stage + 1
        begin = max(free[task.row], done.get((task.kind, neighbour, task.micro), 0.0))
        end = begin + task.end - task.begin
        free[task.row] = done[task.kind, task.stage, task.micro] = end
        placed.append(task._replace(begin=begin, end=end))
    return placed


def step_table(steps: Mapping[str, Mapping[int, Sequence[Task]]]) -> Table:
    """For each kind of images and number of micro-batches the milliseconds of a step.

    The work of each of the two devices; the step if its slots were equal; the step.
    """
    rows = []
    for images, by_number in steps.items():
        for micro, tasks in sorted(by_number.items()):
            busy = [sum(t.end - t.begin for t in tasks if t.row == s) for s in (0, 1)]
            slots = sum(busy) / (2 * micro) * (micro + 1)
            seconds = *busy, slots, duration(tasks)
            rows.append([images, micro, *(round(1e3 * value) for value in seconds)])
    return Table(["ms", "m", "device 0 works", "device 1 works", "equal slots", "step"], rows)


def equality(start: Mapping, images: torch.Tensor, labels: torch.Tensor) -> Table:
    """How many of the split model's gradients, of four micro-batches, are one device's.

    In float64; one device takes the same micro-batches, and then the batch at once.
    """
    images, where = images.double(), devices(2)

    def after(take: Callable, network: nn.Module, micro: int) -> list[torch.Tensor]:
        network.double().load_state_dict(start)
        take(network, images, labels, micro)
        return [p.grad.cpu() for p in network.parameters()]

    split, rows = after(take_step, ModelParallelResNet50(where), 4), []
    for how, micro in (("in the same four micro-batches", 4), ("at once", 1)):
        one = after(unsplit_step, torchvision.models.resnet50().to(images.device), micro)
        far = [
            largest_difference(a, b) / b.abs().max().item()
            for a, b in zip(split, one, strict=True)
        ]
        rows.append([how, f"{sum(share < 1e-9 for share in far)} of {len(far)}"])
    return Table(["one device takes them", "gradients within rounding"], rows)
