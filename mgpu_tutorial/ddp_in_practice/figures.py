"""Apparatus, not the lesson: the trace of a step as a picture."""

from mgpu_tutorial.ddp_in_practice.practice import read_trace
from mgpu_tutorial.lab import timeline
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event


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
