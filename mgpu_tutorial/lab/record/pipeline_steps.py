"""The steps of a pipeline: which stage worked on which micro-batch, and when.

A rank marks each piece of work with `span("F 2 5")`: the forward of stage 2 on micro-batch
5. F is a forward and B a backward; where a schedule splits the backward, I makes the gradient
of the stage's input and W those of its weights. Around each step stands a `span("step")`.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from mgpu_tutorial.lab.record.report import Report


class Task(NamedTuple):
    """One piece of work: `row` is a rank or a device, `begin` and `end` are seconds."""

    row: int
    stage: int
    kind: str
    micro: int
    begin: float
    end: float


def pipeline_steps(report: Report) -> list[list[Task]]:
    """The tasks of each step of a launch; ValueError where its ranks marked none."""
    found: dict[int, list[Task]] = defaultdict(list)
    for rank in range(report.world_size):
        step = -1
        for event in (e for e in report.events if e.rank == rank and e.kind == "span"):
            step += event.note == "step"
            mark = re.fullmatch(r"([FBIW]) (\d+) (\d+)", event.note)
            if mark and event.end is not None:
                kind, stage, micro = mark[1], int(mark[2]), int(mark[3])
                found[step].append(Task(rank, stage, kind, micro, event.begin, event.end))
    if not found:
        raise ValueError("no stage was recorded: launch with trace=True")
    return [found[step] for step in sorted(found)]


def duration(tasks: Sequence[Task]) -> float:
    """Seconds from the begin of the first task to the end of the last."""
    return max(t.end for t in tasks) - min(t.begin for t in tasks)


def fastest_step(found: Sequence[Sequence[Task]]) -> Sequence[Task]:
    """The step that took least: the others lost more time to whatever else was running."""
    return min(found, key=duration)


def idle_share(tasks: Sequence[Task]) -> float:
    """The part of all rows' time, from 0 to 1, in which no task ran: the bubble."""
    rows = len({t.row for t in tasks})
    return 1 - sum(t.end - t.begin for t in tasks) / (rows * duration(tasks))


def in_flight(tasks: Sequence[Task], row: int) -> int:
    """The most micro-batches whose forward a row had done, and not yet their backward.

    Where the backward is split, I ends it: then the gradient of the input can be sent. (What
    W still needs is memory, and not counted here.)
    """
    waiting = most = 0
    for kind in (name[0] for name in in_order(tasks, row)):
        waiting += {"F": 1, "B": -1, "I": -1, "W": 0}[kind]
        most = max(most, waiting)
    return most


def in_order(tasks: Sequence[Task], row: int) -> list[str]:
    """What a row did, one after the other, such as F0 F1 B0 B1."""
    mine = sorted((t for t in tasks if t.row == row), key=lambda t: t.begin)
    return [f"{t.kind}{t.micro}" for t in mine]
