"""Apparatus, not the lesson: what each cut of ResNet-50 costs, and when a device is at work.

Memory, work and bytes follow from shapes: the network runs on PyTorch's meta device, which
computes nothing (https://docs.pytorch.org/docs/2.13/meta.html).
"""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mgpu_tutorial.lab import Ledger, Table
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.words import bytes_text
from mgpu_tutorial.model_parallel.chart import Task, duration
from mgpu_tutorial.model_parallel.micro_batches import (
    MicroBatchStep,
    forward_backward,
    take_step,
)
from mgpu_tutorial.model_parallel.split_resnet import UNITS, cut_units, units
from mgpu_tutorial.shared.vision import torchvision


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
        """Bytes in training: of a parameter weight, gradient and momentum, float32 each."""
        return 12 * self.parameters + self.activation_bytes


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
        sums = sum(unit.parameters for unit in stage), sum(unit.flops for unit in stage)
        costs.append(Unit(*sums, saved, stage[-1].output_bytes))
    return costs


def most_work(measured: Mapping[str, Unit], cuts: Sequence[str]) -> float:
    """The share of all work that the busiest stage has."""
    work = [stage.flops for stage in stage_costs(measured, cuts)]
    return max(work) / sum(work)


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


class StepAlone(MicroBatchStep):
    """A step whose tasks run one after the other, timed by the processor's clock, which
    stands still while other programs run."""

    clock = staticmethod(time.process_time)

    def queue(self, task: Callable, s: int, i: int, after: Future | None = None) -> Future:
        done = Future()
        done.set_result(self.call(task, s, i, after))
        return done


def step_alone(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, micro: int
) -> list[Task]:
    """A step as devices that share nothing would run it: the shorter of two."""
    taken = []
    for _ in range(2):
        step = StepAlone(model, images, labels, micro)
        forward_backward(step)
        taken.append(lay_out(step.tasks))
    return min(taken, key=duration)


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


def step_table(steps: Mapping[tuple[str, int], Sequence[Task]]) -> Table:
    """By images and number of micro-batches: milliseconds of work, and of the step."""
    rows = []
    for (images, micro), tasks in steps.items():
        busy = [sum(t.end - t.begin for t in tasks if t.row == s) for s in (0, 1)]
        rows.append([images, micro, *(round(1e3 * s) for s in (*busy, duration(tasks)))])
    return Table(["ms", "m", "device 0 works", "device 1 works", "step"], rows)


def equality(split: nn.Module, start: Mapping, *batch: torch.Tensor) -> Table:
    """How many of the split network's gradients, of four micro-batches, are the whole one's.

    In float64; the whole one, a single stage, takes the same micro-batches, or the batch.
    """
    images, labels = batch[0].double(), batch[1]
    whole = torchvision.models.resnet50().double().to(split.devices[0])
    one_stage = SimpleNamespace(stages=[whole], devices=split.devices[:1])

    def gradients(network: nn.Module, in_stages: Any, micro: int) -> list[torch.Tensor]:
        network.load_state_dict(start)
        network.zero_grad()
        take_step(in_stages, images, labels, micro)
        return [p.grad.cpu() for p in network.parameters()]

    found, rows = gradients(split.double(), split, 4), []
    for how, micro in (("in the same four micro-batches", 4), ("at once", 1)):
        pairs = zip(found, gradients(whole, one_stage, micro), strict=True)
        near = [largest_difference(a, b) < 1e-9 * b.abs().max().item() for a, b in pairs]
        rows.append([how, f"{sum(near)} of {len(near)}"])
    return Table(["one device takes them", "gradients within rounding"], rows)
