"""Apparatus, not the lesson: what DDP changes, and what a traced step sent."""

from difflib import unified_diff
from itertools import pairwise
from math import inf
from pathlib import Path
from types import ModuleType

from mgpu_tutorial.ddp_in_practice.practice import read_trace
from mgpu_tutorial.lab import timeline
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.lab.teach.source import Listing


def show_changes(old: ModuleType, new: ModuleType) -> Listing:
    """List what differs between the files of two modules, a line that goes or comes each."""
    files = [Path(module.__file__ or "") for module in (old, new)]
    texts = [file.read_text(encoding="utf-8").splitlines() for file in files]
    changes = unified_diff(*texts, *(file.name for file in files), n=1, lineterm="")
    return Listing("\n".join(changes), files, "diff")


def count_buckets(report: Report) -> int:
    """The buckets that rank 0 sent in the second step of `step_in_parts`, by the trace."""
    mine = [event for event in report.events if event.rank == 0]
    (step,) = [event for event in mine if event.note == "step 1"]
    return sum(e.op == "all_reduce" and step.begin <= e.begin <= step.end for e in mine)


def draw_trace(folder: str, ranks: int = 2) -> Plot:
    """Forward, backward (pale) and gloo's all_reduces (hatched), from the ranks' traces."""
    events = []

    def add(rank: int, kind: str, begin: float, end: float, **more: str | float) -> None:
        times = begin / 1e3, end / 1e3
        events.append(Event(rank, len(events), kind, *times, **more))

    for rank in range(ranks):
        forwards = sorted(read_trace(folder, rank, "DistributedDataParallel.forward"))
        pieces = read_trace(folder, rank, "autograd::engine")
        for span in forwards:
            add(rank, "span", *span, note="forward")
        begins = [begin for begin, _ in forwards] or [-inf]
        for first, last in pairwise([*begins, inf]):  # a backward comes after its forward
            part = [piece for piece in pieces if first <= piece[0] < last]
            ends = max(end for _, end in part)
            add(rank, "span", min(part)[0], ends, note="backward")
        for begin, end in sorted(read_trace(folder, rank, "gloo:all_reduce")):
            add(rank, "all_reduce", begin, end, done=end / 1e3)
    return timeline(Report(ranks, events=events))
