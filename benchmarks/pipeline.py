"""How long is a step of ResNet-50, by micro-batches and schedule, on one, two, four ranks?

    python benchmarks/pipeline.py [--samples 8] [--image-size 64] [--repeats 3]

First one process (with one thread, with all of them, split with a thread for each stage),
then the stages on ranks. Each figure is the median over the launches of the fastest of
three steps. Last four ranks whose stages pause instead of computing: their idle share
against the formula.
"""

import os
import statistics
from collections.abc import Callable, Sequence

import torch
from common import options, repeat

from mgpu_tutorial.lab import Table, launch
from mgpu_tutorial.lab.measure import in_turns
from mgpu_tutorial.model_parallel import micro_batches
from mgpu_tutorial.model_parallel import split_resnet as resnet
from mgpu_tutorial.model_parallel.tasks import fastest_step, idle_share, pipeline_steps
from mgpu_tutorial.pipelines import figures, schedules
from mgpu_tutorial.pipelines import work as works
from mgpu_tutorial.shared.vision import torchvision

STEPS = 3
ORDERS = ["GPipe", "1F1B", "interleaved 1F1B"]


def one_process(
    rank: int, world_size: int, samples: int, image_size: int, micros: Sequence[int]
) -> dict[str, list[float]]:
    """Milliseconds of a step for each number of micro-batches, by what shares the work."""
    data = works.ResNetStages(samples=samples, image_size=image_size).batch(1)
    whole = torchvision.models.resnet50()
    split = resnet.ModelParallelResNet50(("cpu", "cpu"))
    split.load_state_dict(whole.state_dict())
    every = os.cpu_count() or 1
    times: dict[str, list[float]] = {}
    for name, model, step, threads in (
        ("whole, 1 thread(s)", whole, resnet.unsplit_step, 1),
        (f"whole, {every} thread(s)", whole, resnet.unsplit_step, every),
        ("split, a queue a stage", split, micro_batches.take_step, 1),
    ):
        torch.set_num_threads(threads)
        times[name] = [fastest(model, step, *data, micro) for micro in micros]
    return times


def fastest(model: torch.nn.Module, step: Callable, *batch: object) -> float:
    """Milliseconds of the fastest step; the first also allocates, and does not count."""

    def whole_step() -> None:
        model.zero_grad()
        step(model, *batch)

    return 1e3 * min(in_turns({"step": whole_step}, STEPS, warm_up=1)["step"])


def on_ranks(
    rank: int, world_size: int, samples: int, image_size: int, micros: Sequence[int]
) -> dict[str, list[float]]:
    """Milliseconds of a step for each number of micro-batches, by schedule."""
    times: dict[str, list[float]] = {}
    cuts = ("layer2.0", "layer3.0", "layer4.0")
    for name in ORDERS[: 3 if world_size == 2 else 2]:  # ResNet-50 is cut into four at most
        times[name] = []
        count = len(schedules.stages_on_rank(name, rank, world_size)) * world_size
        each = 4 // count  # of four parts, joined to as many stages
        work = works.ResNetStages(cuts[each - 1 :: each], samples, image_size)
        for micro in micros:
            seconds = float("nan")
            if name == "GPipe" or micro >= world_size:  # 1F1B refuses fewer
                run = figures.measure_schedule(rank, world_size, name, micro, work, STEPS)
                seconds = run.seconds
            times[name].append(1e3 * seconds)
    return times


def bubbles(repeats: int) -> Table:
    """The idle share of four ranks whose stages pause, by schedule and micro-batches."""
    rows = []
    for name in schedules.SCHEDULES:
        stages = len(schedules.stages_on_rank(name, 0, 4))
        zero_bubble = name == "zero bubble"
        for micro in (4, 8, 16):
            what = name, micro, works.Pauses(4, 0.02, split_backward=zero_bubble)
            reports = [
                launch(figures.measure_schedule, 4, *what, trace=True) for _ in range(repeats)
            ]
            shares = [idle_share(fastest_step(pipeline_steps(r))) for r in reports]
            formula = "-" if zero_bubble else f"{schedules.bubble(4, micro, stages):.0%}"
            rows.append([name, micro, formula, f"{statistics.median(shares):.0%}"])
    return Table(["schedule", "micro-batches", "formula", "measured idle share"], rows)


def main() -> None:
    given = options(__doc__, samples=8, image_size=64, repeats=3)
    micros = [m for m in (1, 2, 4, 8) if given.samples % m == 0]
    size = given.samples, given.image_size, micros
    rows = []
    for ranks, worker in ((1, one_process), (2, on_ranks), (4, on_ranks)):
        for name, runs in repeat(given.repeats, ranks, worker, *size).items():
            middle = [statistics.median(column) for column in zip(*runs, strict=True)]
            rows.append([ranks, name, *(f"{ms:.0f}" if ms == ms else "-" for ms in middle)])
    print(f"ResNet-50, {given.samples} images of {given.image_size}: milliseconds a step")
    print(Table(["ranks", "how", *(f"m = {m}" for m in micros)], rows))
    print("four ranks that pause for 20 ms a forward, 40 ms a backward")
    print(bubbles(given.repeats))


if __name__ == "__main__":
    main()
