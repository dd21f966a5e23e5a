"""Apparatus, not the lesson: counts calls, draws a trace, and knows an exercise's answer."""

from collections.abc import Iterable

import torch

from mgpu_tutorial.ddp_buckets.measurements import count_calls
from mgpu_tutorial.ddp_in_practice.practice import Interval, read_trace
from mgpu_tutorial.lab.colours import COLOURS, TONES
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet


def calls_of_last_step(report: Report) -> int:
    """How many all_reduces rank 0 made in the second step of `accumulate_gradients`."""
    return count_calls(report, "step 1").count


def draw_trace(folder: str, ranks: int = 2) -> Plot:
    """Backward (pale) and gloo's all_reduces (hatched) of each rank, from their traces."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.9 + 0.9 * ranks), layout="constrained")
    axes = figure.subplots()
    rows = [
        [read_trace(folder, rank, name) for name in ("autograd::engine", "gloo:all_reduce")]
        for rank in range(ranks)
    ]
    start = min(begin for row in rows for part in row for begin, _ in part)
    for rank, (compute, calls) in enumerate(rows):
        pale = [(begin - start, end - begin) for begin, end in compute]
        style = {"facecolors": COLOURS[rank], "edgecolor": "white"}
        axes.broken_barh(pale, (2 * rank, 0.8), alpha=0.35, **style)
        lanes = in_lanes(calls)  # gloo works on two calls at a time
        high = 0.8 / max(1, len(lanes))
        for number, lane in enumerate(lanes):
            hatched = [(begin - start, end - begin) for begin, end in lane]
            place = 2 * rank + 0.85 + number * high, 0.95 * high
            axes.broken_barh(hatched, place, hatch="//", **style)
        axes.text(0.0, 2 * rank - 0.08, f"rank {rank}", color=TONES[rank].text, weight="bold")
    places = [2 * rank + lane for rank in range(ranks) for lane in (0.4, 1.25)]
    axes.set_yticks(places, ["backward", "all_reduce"] * ranks)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the first of them (measured on this machine)")
    axes.spines[["top", "right"]].set_visible(False)
    return Plot(figure, f"backward and all_reduces of {ranks} ranks, from the profiler")


def in_lanes(intervals: Iterable[Interval]) -> list[list[Interval]]:
    """Share intervals out to as few lanes as it takes for none to lie on another."""
    lanes: list[list[Interval]] = []
    for begin, end in sorted(intervals):
        free = next((lane for lane in lanes if lane[-1][1] <= begin), None)
        if free is None:
            free = []
            lanes.append(free)
        free.append((begin, end))
    return lanes


def accuracy_of_one_process(count: int = 1000) -> float:
    """Which share of the first `count` digits an untrained network of seed 0 reads."""
    torch.manual_seed(0)
    model, data = SmallConvNet(), digits()
    with torch.no_grad():
        found = model(data.images[:count]).argmax(dim=1)
    return (found == data.labels[:count]).float().mean().item()
