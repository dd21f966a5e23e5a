"""The steps of a pipeline: which stage worked on which micro-batch, and when.

A rank marks each task with `span("F 2 5")`: the forward of stage 2 on micro-batch 5. B is a
backward; of a split one I is the half for the input and W the half for the weights. A
`span("step")` stands around each step.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from mgpu_tutorial.lab.record.report import Report


class Task(NamedTuple):
    """What a device does at one time: `row` is its rank or number, times are in seconds."""

    row: int
    stage: int
    kind: str
    micro: int
    begin: float
    end: float


def pipeline_steps(report: Report) -> list[list[Task]]:
    """The tasks of each step of a launch; ValueError where its ranks marked none."""
    steps: dict[int, list[Task]] = defaultdict(list)
    for rank in range(report.world_size):
        step = -1
        for event in (e for e in report.events if e.rank == rank and e.kind == "span"):
            step += event.note == "step"
            mark = re.fullmatch(r"([FBIW]) (\d+) (\d+)", event.note)
            if mark and event.end is not None:
                kind, stage, micro = mark[1], int(mark[2]), int(mark[3])
                steps[step].append(Task(rank, stage, kind, micro, event.begin, event.end))
    if not steps:
        raise ValueError("no stage was recorded: launch with trace=True")
    return [steps[step] for step in sorted(steps)]


def duration(tasks: Sequence[Task]) -> float:
    """Seconds from the begin of the first task to the end of the last."""
    return max(t.end for t in tasks) - min(t.begin for t in tasks)


def fastest_step(steps: Sequence[Sequence[Task]]) -> Sequence[Task]:
    """The step that took least: the others lost more time to other programs."""
    return min(steps, key=duration)


def idle_share(tasks: Sequence[Task]) -> float:
    """The bubble: the share of all rows' time, from 0 to 1, in which no task ran."""
    rows = len({t.row for t in tasks})
    return 1 - sum(t.end - t.begin for t in tasks) / (rows * duration(tasks))


def in_flight(tasks: Sequence[Task], row: int) -> int:
    """The most micro-batches that a row held: forward done, backward (or I) not yet."""
    waiting = [0]
    for name in in_order(tasks, row):
        waiting.append(waiting[-1] + {"F": 1, "W": 0}.get(name[0], -1))
    return max(waiting)


def in_order(tasks: Sequence[Task], row: int) -> list[str]:
    """What a row did, one after the other, such as F0 F1 B0 B1."""
    tasks_of_row = sorted((t for t in tasks if t.row == row), key=lambda t: t.begin)
    return [f"{t.kind}{t.micro}" for t in tasks_of_row]
