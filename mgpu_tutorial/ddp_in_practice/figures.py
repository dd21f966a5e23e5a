"""Apparatus, not the lesson: counts calls, draws a trace, and knows an exercise's answer."""

import torch

from mgpu_tutorial.ddp_buckets.figures import count_calls
from mgpu_tutorial.ddp_in_practice.practice import read_trace
from mgpu_tutorial.lab import timeline
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet


def calls_of_last_step(report: Report) -> int:
    """How many all_reduces rank 0 made in the second step of `accumulate_gradients`."""
    return count_calls(report, "step 1").count


def draw_trace(folder: str, ranks: int = 2) -> Plot:
    """Backward (pale) and gloo's all_reduces (hatched) of each rank, from their traces."""
    events = []
    for rank in range(ranks):
        backward = read_trace(folder, rank, "autograd::engine")
        begin, end = min(backward)[0] / 1e3, max(end for _, end in backward) / 1e3
        events.append(Event(rank, len(events), "span", begin, end, note="backward"))
        for begin, end in sorted(read_trace(folder, rank, "gloo:all_reduce")):
            begin, end = begin / 1e3, end / 1e3
            events.append(Event(rank, len(events), "all_reduce", begin, end, done=end))
    return timeline(Report(ranks, events=events))


def accuracy_of_one_process(count: int = 1000) -> float:
    """The share of the first `count` digits that an untrained network of seed 0 reads."""
    torch.manual_seed(0)
    model, data = SmallConvNet(), digits()
    with torch.no_grad():
        correct = model(data.images[:count]).argmax(dim=1) == data.labels[:count]
    return correct.float().mean().item()
