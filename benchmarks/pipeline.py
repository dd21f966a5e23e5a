"""How long is a step of ResNet-50, by micro-batches and schedule, on one, two, four ranks?

    python benchmarks/pipeline.py [--samples 8] [--image-size 64] [--repeats 3]

First one process (with one thread, with all of them, split with a thread for each stage),
then the stages on ranks. Each figure is the median over the launches of the fastest of
three steps. Last four ranks whose stages pause instead of computing: their idle share
against the formula.
"""

import argparse
import os
import statistics
from collections.abc import Sequence

import torch

from mgpu_tutorial.lab import Table, launch
from mgpu_tutorial.lab.measure import in_turns
from mgpu_tutorial.model_parallel import micro_batches
from mgpu_tutorial.model_parallel import split_resnet as resnet
from mgpu_tutorial.model_parallel.tasks import fastest_step, idle_share, pipeline_steps
from mgpu_tutorial.pipelines import figures, schedules
from mgpu_tutorial.pipelines import work as works

STEPS = 3
ORDERS = ["GPipe", "1F1B", "interleaved 1F1B"]


def one_process(
    rank: int, world_size: int, samples: int, image_size: int, micros: Sequence[int]
) -> dict[str, list[float]]:
    """Milliseconds of a step for each number of micro-batches, by what shares the work."""
    data = resnet.random_images(samples, image_size)
    whole, split = (resnet.new_resnet50(), resnet.ModelParallelResNet50(("cpu", "cpu")))
    split.load_state_dict(whole.state_dict())
    times: dict[str, list[float]] = {}
    for micro in micros:
        for threads in (1, os.cpu_count() or 1):
            torch.set_num_threads(threads)
            best = fastest(whole, lambda m=micro: resnet.unsplit_step(whole, *data, m))
            times.setdefault(f"whole, {threads} thread(s)", []).append(best)
        torch.set_num_threads(1)
        best = fastest(split, lambda m=micro: micro_batches.forward_backward(split, *data, m))
        times.setdefault("split, a queue a stage", []).append(best)
    return times


def fastest(model: torch.nn.Module, action) -> float:
    """Milliseconds of the fastest step; the first also allocates, and does not count."""

    def step() -> None:
        model.zero_grad()
        action()

    return 1e3 * min(in_turns({"step": step}, STEPS, warm_up=1)["step"])


def on_ranks(
    rank: int, world_size: int, samples: int, image_size: int, micros: Sequence[int]
) -> dict[str, list[float]]:
    """Milliseconds of a step for each number of micro-batches, by schedule."""
    model, times = resnet.new_resnet50(), {}
    cuts = ("layer2.0", "layer3.0", "layer4.0")
    work = works.ResNetStages(cuts, samples, image_size, model)
    for name in ORDERS[: 3 if world_size == 2 else 2]:  # ResNet-50 is cut into four at most
        for micro in micros:
            model.zero_grad()
            least = world_size if name != "GPipe" else 1  # 1F1B refuses fewer
            result = float("nan")
            if micro >= least:
                run = figures.measure_schedule(rank, world_size, name, micro, work, STEPS)
                result = 1e3 * run.seconds
            times.setdefault(name, []).append(result)
    return times


def medians(runs: list[dict[str, list[float]]]) -> dict[str, list[str]]:
    """The middle of several launches, as text; a dash where a schedule was not run."""
    found = {}
    for name in runs[0]:
        columns = zip(*(run[name] for run in runs), strict=True)
        middle = [statistics.median(column) for column in columns]
        found[name] = [f"{ms:.0f}" if ms == ms else "-" for ms in middle]
    return found


def bubbles(repeats: int) -> Table:
    """The idle share of four ranks whose stages pause, by schedule and micro-batches."""
    rows = []
    for name in schedules.SCHEDULES:
        stages_per_rank = len(schedules.stages_on_rank(name, 0, 4))
        for micro in (4, 8, 16):
            shares = []
            for _ in range(repeats):
                work = works.Pauses(4, 0.02, split_backward=name == "zero bubble")
                given = name, micro, work
                report = launch(figures.measure_schedule, 4, *given, trace=True)
                shares.append(idle_share(fastest_step(pipeline_steps(report))))
            formula = (
                f"{schedules.bubble(4, micro, stages_per_rank):.0%}"
                if name != "zero bubble"
                else "-"
            )
            rows.append([name, micro, formula, f"{statistics.median(shares):.0%}"])
    return Table(["schedule", "micro-batches", "formula", "measured idle share"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    micros = [m for m in (1, 2, 4, 8) if given.samples % m == 0]
    rows = []
    for ranks, worker in ((1, one_process), (2, on_ranks), (4, on_ranks)):
        runs = []
        for _ in range(given.repeats):
            size = (given.samples, given.image_size, micros)
            report = launch(worker, ranks, *size, device="cpu", timeout=600)
            runs.append(report.results[0])
        rows += [[ranks, name, *cells] for name, cells in medians(runs).items()]
    print(f"ResNet-50, {given.samples} images of {given.image_size}: milliseconds a step")
    print(Table(["ranks", "how", *(f"m = {m}" for m in micros)], rows))
    print("four ranks that pause for 20 ms a forward, 40 ms a backward")
    print(bubbles(given.repeats))


if __name__ == "__main__":
    main()
