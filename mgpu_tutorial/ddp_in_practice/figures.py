"""Apparatus, not the lesson: what DDP changes, a traced step, and what a training reads."""

from collections.abc import Sequence
from difflib import unified_diff
from pathlib import Path
from types import ModuleType

import torch

from mgpu_tutorial.ddp_in_practice.practice import read_trace
from mgpu_tutorial.lab import Table, timeline
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.lab.teach.source import Listing
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet


def show_changes(old: ModuleType, new: ModuleType) -> Listing:
    """List what differs between the files of two modules, a line that goes or comes each."""
    files = [Path(module.__file__ or "") for module in (old, new)]
    texts = [file.read_text(encoding="utf-8").splitlines() for file in files]
    changes = unified_diff(*texts, *(file.name for file in files), n=1, lineterm="")
    return Listing("\n".join(changes), files, "diff")


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


def tabulate_training(alone: Sequence[tuple], together: Sequence[tuple]) -> Table:
    """First and last loss, and the digits read right; a rank gave its losses, parameters."""
    test, model, rows = digits(train=False), SmallConvNet(), []
    for name, results in ("one process", alone), ("four ranks", together):
        losses = [
            sum(each) / len(results) for each in zip(*(r[0] for r in results), strict=True)
        ]
        with torch.no_grad():
            for mine, trained in zip(model.parameters(), results[0][1], strict=True):
                mine.copy_(trained)
            hits = (model(test.images).argmax(dim=1) == test.labels).float().mean()
        rows.append([name, f"{losses[0]:.2f}", f"{losses[-1]:.2f}", f"{hits:.0%}"])
    return Table(["", "first loss", "last loss", f"{len(test)} test digits read"], rows)
