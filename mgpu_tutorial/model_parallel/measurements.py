"""Only measures: what each cut of ResNet-50 costs, and when each device is at work.

Memory, work and bytes follow from shapes: the network runs on PyTorch's meta device, which
computes nothing (https://docs.pytorch.org/docs/2.13/meta.html). Times are the processor's
own, so that other programs do not count.
"""

import functools
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from mgpu_tutorial.lab import Ledger, Table
from mgpu_tutorial.lab.record.pipeline_steps import Task
from mgpu_tutorial.lab.words import bytes_text
from mgpu_tutorial.model_parallel.micro_batches import Step, backward_stage, forward_stage
from mgpu_tutorial.model_parallel.recomputation import forward_in_groups
from mgpu_tutorial.model_parallel.resnet_cuts import UNITS, cut_units, units
from mgpu_tutorial.model_parallel.split_resnet import gradients
from mgpu_tutorial.shared.vision import torchvision

SGD_BYTES = 12  # a parameter in training: weight, gradient and momentum, float32 each


class Unit(NamedTuple):
    """What one unit of the network needs for one batch.

    `shape` is that of its output, `flops` counts the operations of its forward, `saved` has
    the bytes of each storage that autograd keeps for its backward.
    """

    name: str
    shape: list[int]
    parameters: int
    flops: int
    saved: Mapping[object, int]

    @property
    def output_bytes(self) -> int:
        """What a cut behind this unit sends, in each direction; float32."""
        return 4 * math.prod(self.shape)


class StageCost(NamedTuple):
    """What one stage needs: `parameters` and `flops` are counted, the others are bytes."""

    parameters: int
    activation_bytes: int
    flops: int
    output_bytes: int

    @property
    def memory(self) -> int:
        """Bytes in training, with SGD and momentum."""
        return SGD_BYTES * self.parameters + self.activation_bytes


def measure(batch: int = 4, image_size: int = 64) -> tuple[Unit, ...]:
    """The units of ResNet-50 for a batch of square images, in the order of its forward."""
    return _measured(batch, image_size)  # the cache tells measure(4) from measure(batch=4)


@functools.cache
def _measured(batch: int, image_size: int) -> tuple[Unit, ...]:
    with torch.device("meta"):
        model = torchvision.models.resnet50()
        x = torch.empty(batch, 3, image_size, image_size)
    found = []
    for name, unit in units(model).items():
        ledger = Ledger()
        with ledger.saved_for_backward(unit), FlopCounterMode(display=False) as flops:
            x = unit(x)
        parameters = sum(p.numel() for p in unit.parameters())
        saved = ledger.storages("activations")
        found.append(Unit(name, list(x.shape), parameters, flops.get_total_flops(), saved))
        x = x.detach().requires_grad_()
    return tuple(found)


def stage_shapes(cuts: Sequence[str], batch: int, image_size: int) -> list[list[int]]:
    """The shapes between the stages, from the images to the result."""
    shapes = _shapes(batch, image_size)
    return [shapes[i] for i in (0, *(UNITS.index(name) for name in cuts), -1)]


@functools.cache
def _shapes(batch: int, image_size: int) -> tuple[list[int], ...]:
    """Those of the images, and of what each unit puts out."""
    with torch.device("meta"), torch.no_grad():
        model = torchvision.models.resnet50(norm_layer=nn.Identity)  # which keeps shapes too
        passed = [torch.empty(batch, 3, image_size, image_size)]
        for unit in units(model).values():
            passed.append(unit(passed[-1]))
    return tuple(list(x.shape) for x in passed)


def stage_costs(measured: Sequence[Unit], cuts: Sequence[str]) -> list[StageCost]:
    """What each stage needs, if a new one begins at each unit that `cuts` names.

    A stage's input counts as its own: on another device it is a copy.
    """
    found = []
    for names in cut_units(cuts):
        mine = [unit for unit in measured if unit.name in names]
        saved = {key: nbytes for unit in mine for key, nbytes in unit.saved.items()}
        found.append(
            StageCost(
                parameters=sum(unit.parameters for unit in mine),
                activation_bytes=sum(saved.values()),
                flops=sum(unit.flops for unit in mine),
                output_bytes=mine[-1].output_bytes,
            )
        )
    return found


def most_work(measured: Sequence[Unit], cuts: Sequence[str]) -> float:
    """The share of all work that the busiest stage has."""
    work = [stage.flops for stage in stage_costs(measured, cuts)]
    return max(work) / sum(work)


def best_cuts(measured: Sequence[Unit]) -> dict[str, str]:
    """The best single cut for each aim: the smallest worst device, or the fewest bytes."""
    pairs = {name: stage_costs(measured, [name]) for name in UNITS[1:]}
    return {
        "memory": min(pairs, key=lambda name: max(stage.memory for stage in pairs[name])),
        "balance": min(pairs, key=lambda name: max(stage.flops for stage in pairs[name])),
        "traffic": min(pairs, key=lambda name: pairs[name][0].output_bytes),
    }


def cut_table(measured: Sequence[Unit]) -> Table:
    """A row for each possible cut into two: parameters, activations, work, bytes sent."""
    rows = []
    for name in UNITS[1:]:
        pair = first, second = stage_costs(measured, [name])
        rows.append(
            [
                name,
                *(f"{stage.parameters / 1e6:.1f} M" for stage in pair),
                *(bytes_text(stage.activation_bytes) for stage in pair),
                bytes_text(max(first.memory, second.memory)),
                f"{first.flops / (first.flops + second.flops):.0%}",
                bytes_text(first.output_bytes),
            ]
        )
    header = ["cut before", "parameters 0", "1", "activations 0", "1"]
    header += ["fuller device", "work 0", "sends"]
    return Table(header, rows)


# When each device works


def step_alone(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, micro: int
) -> list[Task]:
    """The tasks of a step, as devices that share nothing would run them side by side.

    They are computed one after the other, each timed by the processor's clock, which
    stands still while other programs run (on a GPU by the usual one), and then laid out.
    """
    on_gpu = any(device.type == "cuda" for device in model.devices)
    clock = time.perf_counter if on_gpu else time.process_time
    step, stages = Step(model, images, labels, micro, clock), range(len(model.stages))
    for i in range(micro):
        passed_on = None
        for s in stages:
            passed_on = forward_stage(step, s, i, passed_on)
    for i in range(micro):
        passed_on = None
        for s in reversed(stages):
            passed_on = backward_stage(step, s, i, passed_on)
    return lay_out(step.tasks)


def lay_out(tasks: Iterable[Task]) -> list[Task]:
    """Begin each task as soon as its row is free and what it waits for is done.

    `tasks` stand in an order in which none comes before what it waits for: F waits for F of
    the stage before, B for B of the stage behind.
    """
    free: dict[int, float] = defaultdict(float)  # the end of each row's task before
    done: dict[tuple[str, int, int], float] = {}
    found = []
    for task in tasks:
        neighbour = task.stage - 1 if task.kind == "F" else task.stage + 1
        begin = max(free[task.row], done.get((task.kind, neighbour, task.micro), 0.0))
        end = begin + task.end - task.begin
        free[task.row] = done[task.kind, task.stage, task.micro] = end
        found.append(task._replace(begin=begin, end=end))
    return found


def steps_alone(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    micros: Sequence[int],
    repeats: int = 2,
) -> dict[int, list[Task]]:
    """The step with the least work of `repeats`, by the number of micro-batches, in turns."""
    found: dict[int, list[Task]] = {}
    for _ in range(repeats):
        for micro in micros:
            model.zero_grad()
            tasks = step_alone(model, images, labels, micro)
            if micro not in found or work_seconds(tasks) < work_seconds(found[micro]):
                found[micro] = tasks
    return found


def work_seconds(tasks: Iterable[Task]) -> float:
    """Seconds in which any device computes, all devices added up."""
    return sum(task.end - task.begin for task in tasks)


def step_table(steps: Mapping[str, Mapping[int, Sequence[Task]]]) -> Table:
    """A row for each kind of images and number of micro-batches, in whole milliseconds.

    The work of each device; what the step would take if it were equal slots; the step.
    """
    rows = []
    for images, by_number in steps.items():
        for micro, tasks in sorted(by_number.items()):
            stages, work = len({task.row for task in tasks}), 1e3 * work_seconds(tasks)
            slots = work / (stages * micro) * (micro + stages - 1)
            busy = [
                round(1e3 * work_seconds(task for task in tasks if task.row == s))
                for s in range(stages)
            ]
            rows.append([images, micro, *busy, round(slots), round(1e3 * end_of(tasks))])
    devices = [f"device {s} works, ms" for s in range(len(rows[0]) - 4)]
    return Table(["images", "micro-batches", *devices, "equal slots, ms", "step, ms"], rows)


def end_of(tasks: Iterable[Task]) -> float:
    """The seconds of a step that was laid out: it begins at 0."""
    return max(task.end for task in tasks)


class Kept(NamedTuple):
    """What one step kept and took, with recomputation in groups of `group_size` units.

    `kept_bytes`: held by autograd between forward and backward, beside parameters and
    images; `group_bytes`: what the largest group holds while it is computed again;
    `forward_seconds`, `backward_seconds`: of the processor. Without groups the size is 0.
    """

    group_size: int
    kept_bytes: int
    group_bytes: int
    forward_seconds: float
    backward_seconds: float


def measure_kept(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, group_sizes: Sequence[int]
) -> list[Kept]:
    """A step of ResNet-50 for each size of a group, the first of them once more before."""
    measured = measure(len(images), images.shape[-1])
    found = []
    for size in [group_sizes[0], *group_sizes]:
        model.zero_grad()
        ledger = Ledger()
        ledger.record_state(model)
        ledger.add("images", images)
        begin = time.process_time()
        with ledger.saved_for_backward():
            output = forward_in_groups(model, images, size) if size else model(images)
        middle = time.process_time()
        kept = ledger.saved_now(images.device)
        loss = cross_entropy(output, labels)
        again = time.process_time()
        loss.backward()
        end = time.process_time()
        groups = stage_costs(measured, UNITS[size::size]) if size else []
        inside = max((group.activation_bytes for group in groups), default=0)
        found.append(Kept(size, kept, inside, middle - begin, end - again))
    return found[1:]


def kept_table(found: Sequence[Kept]) -> Table:
    """A row for each step: MiB kept, of the largest group, and both together."""
    rows = []
    for run in found:
        amounts = run.kept_bytes, run.group_bytes, run.kept_bytes + run.group_bytes
        rows.append([_name(run), *(f"{amount / 2**20:.1f}" for amount in amounts)])
    return Table(["MiB", "kept", "largest group", "together"], rows)


def seconds_table(found: Sequence[Kept]) -> Table:
    """A row for each step: milliseconds of its forward and backward, and of both."""
    rows = []
    for run in found:
        seconds = run.forward_seconds, run.backward_seconds
        both = [*seconds, sum(seconds)]
        rows.append([_name(run), *(round(1e3 * each) for each in both)])
    return Table(["ms", "forward", "backward", "both"], rows)


def _name(run: Kept) -> str:
    return f"groups of {run.group_size}" if run.group_size else "keep everything"


def mean_and_gradients(model: nn.Module) -> tuple[dict, dict]:
    """BatchNorm's first running mean, and the gradients, on the CPU."""
    return {"mean": model.bn1.running_mean.clone().cpu()}, gradients(model)


def largest_distance(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]
) -> float:
    """Between tensors of the same name, as a share of the norm in `other`."""
    shares = [(one[name] - values).norm() / values.norm() for name, values in other.items()]
    return max(share.item() for share in shares)


def gradients_of_two_layers() -> list[torch.Tensor]:
    """What one process computes where an exercise has a layer on each of two ranks."""
    layers = []
    for rank in (0, 1):
        torch.manual_seed(rank)
        layers.append(nn.Linear(4, 4))
    x = torch.linspace(-1, 1, 8).view(2, 4)
    layers[1](layers[0](x)).square().mean().backward()
    return [layer.weight.grad for layer in layers]
