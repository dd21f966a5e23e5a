"""Apparatus, not the lesson: what each cut of ResNet-50 costs, and when a device is at work.

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
from mgpu_tutorial.lab.colours import colour, tone
from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.table import formatted
from mgpu_tutorial.lab.words import bytes_text
from mgpu_tutorial.model_parallel.micro_batches import (
    MicroBatchStep,
    backward_stage,
    forward_stage,
)
from mgpu_tutorial.model_parallel.resnet_cuts import UNITS, cut_units, units
from mgpu_tutorial.model_parallel.split_resnet import forward_in_groups
from mgpu_tutorial.model_parallel.tasks import Task
from mgpu_tutorial.shared.vision import torchvision

SGD_BYTES = 12  # a parameter in training: weight, gradient and momentum, float32 each
PANELS = ("parameters", "activations", "work", "sends")


# What a cut costs, from shapes


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
        """The bytes that a cut behind this unit sends in each direction; float32."""
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


@functools.cache
def measure(batch: int = 4, image_size: int = 64) -> tuple[Unit, ...]:
    """The units of ResNet-50 for a batch of square images, in the order of its forward."""
    with torch.device("meta"):
        model = torchvision.models.resnet50()
        x = torch.empty(batch, 3, image_size, image_size)
    measured = []
    for name, unit in units(model).items():
        ledger = Ledger()
        with ledger.saved_for_backward(unit), FlopCounterMode(display=False) as flops:
            x = unit(x)
        parameters = sum(p.numel() for p in unit.parameters())
        saved = ledger.storages("activations")
        measured.append(Unit(name, list(x.shape), parameters, flops.get_total_flops(), saved))
        x = x.detach().requires_grad_()
    return tuple(measured)


def stage_costs(measured: Sequence[Unit], cuts: Sequence[str]) -> list[StageCost]:
    """What each stage needs, if a new one begins at each unit that `cuts` names.

    A stage's input counts as its own: on another device it is a copy.
    """
    costs = []
    for stage in stages_of(measured, cuts):
        saved = {key: nbytes for unit in stage for key, nbytes in unit.saved.items()}
        parameters = sum(unit.parameters for unit in stage)
        flops = sum(unit.flops for unit in stage)
        costs.append(
            StageCost(parameters, sum(saved.values()), flops, stage[-1].output_bytes)
        )
    return costs


def stages_of(measured: Sequence[Unit], cuts: Sequence[str]) -> list[list[Unit]]:
    """The units of each stage; ValueError for cuts that ResNet-50 does not have."""
    by_name = {unit.name: unit for unit in measured}
    return [[by_name[name] for name in names] for names in cut_units(cuts)]


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
        row = [name, *(f"{stage.parameters / 1e6:.1f} M" for stage in pair)]
        row += [bytes_text(stage.activation_bytes) for stage in pair]
        row += [bytes_text(max(first.memory, second.memory))]
        row += [f"{first.flops / (first.flops + second.flops):.0%}"]
        rows.append([*row, bytes_text(first.output_bytes)])
    header = ["cut before", "parameters 0", "1", "activations 0", "1"]
    header += ["fuller device", "work 0", "sends"]
    return Table(header, rows)


def cut_picture(measured: Sequence[Unit], cuts: Sequence[str]) -> Plot:
    """Draw parameters, activations, work and bytes sent, unit by unit, a colour a device.

    A storage that several units of a stage save stands at the first of them. Raises
    ValueError for cuts that ResNet-50 does not have.
    """
    from matplotlib.figure import Figure

    stages = stages_of(measured, cuts)
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    grid = figure.subplots(len(PANELS), 1, sharex=True)
    tones = [colour(s) for s, stage in enumerate(stages) for _ in stage]
    heights = (
        [unit.parameters for unit in measured],
        [nbytes for stage in stages for nbytes in first_saved(stage)],
        [unit.flops for unit in measured],
    )
    for axes, values in zip(grid, heights, strict=False):
        axes.bar(range(len(UNITS)), values, 0.74, color=tones)
    # the bytes behind each unit: a full bar where a cut sends them, else an empty one
    sent = [unit.output_bytes for unit in measured[:-1]]
    fills = [tones[i] if UNITS[i + 1] in cuts else "none" for i in range(len(sent))]
    places = [i + 0.5 for i in range(len(sent))]
    grid[-1].bar(places, sent, 0.6, color=fills, edgecolor=tones[:-1], linewidth=1.2)
    # at each device what it has of everything, and what a cut makes it send
    amounts = [_amounts(cost) for cost in stage_costs(measured, cuts)]
    for axes, name, texts in zip(grid, PANELS, zip(*amounts, strict=True), strict=True):
        _frame_panel(axes, name, cuts, texts if name != "sends" else texts[:-1])
    _name_units(grid[-1])
    title = f"cut before {', '.join(cuts)}"
    grid[0].set_title(title, fontsize=13)
    lines = [
        f"device {s}: {parameters} parameters, {saved} of activations, {work}"
        + (f", sends {sends}" if s < len(cuts) else "")
        for s, (parameters, saved, work, sends) in enumerate(amounts)
    ]
    return Plot(figure, "\n".join([title, *lines]))


def first_saved(stage: Sequence[Unit]) -> list[int]:
    """The bytes that each unit is the first of its stage to save."""
    seen: set[object] = set()
    sizes = []
    for unit in stage:
        sizes.append(sum(nbytes for key, nbytes in unit.saved.items() if key not in seen))
        seen |= unit.saved.keys()
    return sizes


def _amounts(cost: StageCost) -> tuple[str, str, str, str]:
    """What one device has of each of the PANELS."""
    return (
        f"{cost.parameters / 1e6:.2f} M",
        bytes_text(cost.activation_bytes),
        f"{cost.flops / 1e9:.2f} GFLOP",
        bytes_text(cost.output_bytes),
    )


def _frame_panel(axes, name: str, cuts: Sequence[str], texts: Sequence[str]) -> None:
    """The name on the left, a line at each cut, and the text of each device on the right."""
    axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=13)
    axes.set(yticks=[], xlim=(-0.6, len(UNITS) - 0.4))
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for name_of_cut in cuts:
        axes.axvline(UNITS.index(name_of_cut) - 0.5, color=INK, linewidth=2, linestyle="--")
    for s, text in enumerate(texts):
        said = f"{text} sent" if name == "sends" else f"device {s}: {text}"
        look = {"color": tone(s).text, "fontweight": "bold", "fontsize": 12, "va": "top"}
        axes.annotate(said, (1.02, 0.9 - 0.25 * s), xycoords="axes fraction", **look)


def _name_units(axes) -> None:
    """The number of each block, its layer below, and the other units on their side."""
    look = {"ha": "center", "va": "top", "annotation_clip": False, "fontsize": 11}
    look["xycoords"] = ("data", "axes fraction")
    for i, name in enumerate(UNITS):
        layer, _, block = name.partition(".")
        axes.annotate(block or layer, (i, -0.06), rotation=0 if block else 90, **look)
        if block == "0":
            middle = i + (sum(other.startswith(f"{layer}.") for other in UNITS) - 1) / 2
            axes.annotate(layer, (middle, -0.34), fontweight="bold", **look)
    axes.set_xticks([])


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
    step = MicroBatchStep(model, images, labels, micro, clock)
    stages = range(len(model.stages))
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


def steps_alone(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    micros: Sequence[int],
    repeats: int = 2,
) -> dict[int, list[Task]]:
    """By number of micro-batches the step with the least work of `repeats`, in turns."""
    steps: dict[int, list[list[Task]]] = {micro: [] for micro in micros}
    for _ in range(repeats):
        for micro in micros:
            model.zero_grad()
            steps[micro].append(step_alone(model, images, labels, micro))
    return {micro: min(taken, key=work_seconds) for micro, taken in steps.items()}


def work_seconds(tasks: Iterable[Task]) -> float:
    """Seconds in which any device computes, all devices added up."""
    return sum(task.end - task.begin for task in tasks)


def step_table(steps: Mapping[str, Mapping[int, Sequence[Task]]]) -> Table:
    """A row for each kind of images and number of micro-batches, in whole milliseconds.

    The work of each of the two devices; the step if it were equal slots; the step.
    """
    rows = []
    for images, by_number in steps.items():
        for micro, tasks in sorted(by_number.items()):
            busy = [work_seconds(task for task in tasks if task.row == s) for s in (0, 1)]
            slots = sum(busy) / (2 * micro) * (micro + 1)
            seconds = *busy, slots, end_of(tasks)
            rows.append([images, micro, *(round(1e3 * value) for value in seconds)])
    devices = [f"device {s} works, ms" for s in (0, 1)]
    return Table(["images", "micro-batches", *devices, "equal slots, ms", "step, ms"], rows)


def end_of(tasks: Iterable[Task]) -> float:
    """The seconds of a step that was laid out: it begins at 0."""
    return max(task.end for task in tasks)


# Recomputation


class RecomputationResult(NamedTuple):
    """A step with recomputation in groups of `group_size` units, or without where that is 0.

    `kept_bytes`: held by autograd between forward and backward, beside parameters and
    images; `group_bytes`: what the largest group holds while it is computed again;
    `forward_seconds`, `backward_seconds`: of the processor.
    """

    group_size: int
    kept_bytes: int
    group_bytes: int
    forward_seconds: float
    backward_seconds: float

    def __str__(self) -> str:
        return f"groups of {self.group_size}" if self.group_size else "keep everything"


def measure_recomputation(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, group_sizes: Sequence[int]
) -> list[RecomputationResult]:
    """A step of ResNet-50 for each size of a group, the first of them once more before."""
    measured = measure(len(images), images.shape[-1])
    results = []
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
        results.append(RecomputationResult(size, kept, inside, middle - begin, end - again))
    return results[1:]


def kept_table(results: Sequence[RecomputationResult]) -> Table:
    """A row for each step: MiB kept, of the largest group, and both together."""
    sizes = [(str(run), run.kept_bytes / 2**20, run.group_bytes / 2**20) for run in results]
    rows = [(name, kept, group, kept + group) for name, kept, group in sizes]
    columns = {"MiB": "", "kept": ".1f", "largest group": ".1f", "together": ".1f"}
    return formatted(columns, rows)


def seconds_table(results: Sequence[RecomputationResult]) -> Table:
    """A row for each step: milliseconds of its forward and backward, and of both."""
    times = [(str(run), run.forward_seconds, run.backward_seconds) for run in results]
    rows = [
        [name, *(round(1e3 * x) for x in (forward, backward, forward + backward))]
        for name, forward, backward in times
    ]
    return Table(["ms", "forward", "backward", "both"], rows)


def gradients_of_two_layers() -> list[torch.Tensor]:
    """What one process computes where an exercise has a layer on each of two ranks."""
    layers = []
    for rank in (0, 1):
        torch.manual_seed(rank)
        layers.append(nn.Linear(4, 4))
    x = torch.linspace(-1, 1, 8).view(2, 4)
    layers[1](layers[0](x)).square().mean().backward()
    return [layer.weight.grad for layer in layers]


def relative_difference(
    tensors: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> float:
    """The largest difference of two numbers, as a share of the largest in `expected`."""
    return largest_difference(tensors, expected) / max(x.abs().max().item() for x in expected)
