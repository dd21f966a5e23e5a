"""Apparatus, not the lesson: pipelines timed and shown, and one process beside them."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.lab import frame, launch, span
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.model_parallel.figures import duration, tasks_of, within_rounding
from mgpu_tutorial.model_parallel.micro_batches import Task
from mgpu_tutorial.pipelines.work import Pauses, Work


def timed(worker: Callable, *given: object) -> list[Task]:
    """The tasks of the faster of two runs on four ranks: the other was disturbed more."""
    report = launch(run_twice, 4, worker, *given, trace=True)
    return min((tasks_of(report, during) for during in ("first", "second")), key=duration)


def run_twice(rank: int, world_size: int, worker: Callable, *given: object) -> None:
    """Call `worker` twice: each time in a span, from a common start."""
    for name in ("first", "second"):
        dist.barrier()
        with span(name):
            worker(rank, world_size, *given)


def lay_out(tasks: Sequence[Task], **slots: int) -> list[Task]:
    """The same order in slots, so many for each kind of task, such as F=1, B=2.

    A task begins when its row is free and the neighbour has done its part: F waits for F of
    the stage before, B for B of the stage behind.
    """
    free: Counter = Counter()  # when each row ends its latest task
    done: Counter = Counter()
    placed = []
    for task in tasks:
        neighbour = task.stage - 1 if task.kind == "F" else task.stage + 1
        begin = max(free[task.row], done[task.kind, neighbour, task.micro])
        end = begin + slots[task.kind]
        free[task.row] = done[task.kind, task.stage, task.micro] = end
        placed.append(task._replace(begin=begin, end=end))
    return placed


def in_slots(worker: Callable, *given: object) -> Report:
    """A film's frames: five micro-batches on four ranks, a slot for a forward or backward."""
    tasks = tasks_of(launch(worker, 4, Pauses(0.0), 5, *given, trace=True))
    return launch(note_slots, 4, lay_out(tasks, F=1, B=1), trace=True)


def note_slots(rank: int, world_size: int, tasks: Sequence[Task]) -> None:
    """A frame for each slot: this rank's task, and the micro-batches that it holds."""
    begin = {(t.kind, t.micro): t.begin for t in tasks if t.row == rank}
    last = int(duration(tasks))
    for slot in range(last):
        now = {t.row: t for t in tasks if t.begin == slot}
        held = {i for i in range(5) if begin["F", i] <= slot <= begin["B", i]}
        bricks = {"now": ()} | {f"holds {i}": str(i) if i in held else () for i in range(5)}
        came = {}
        if task := now.get(rank):
            bricks["now"] = f"{task.kind}{task.micro}"
            source = rank - 1 if task.kind == "F" else rank + 1
            if 0 <= source < world_size:
                came["now"] = source, "now"
        idle = ", ".join(f"rank {r}" for r in range(world_size) if r not in now) or "none"
        frame(f"Slot {slot + 1} of {last}. Idle: {idle}.", bricks, came, slot)


def held(tasks: Sequence[Task]) -> str:
    """The most micro-batches that each of four ranks held; a stage counts its part."""
    counts, stages = {"F": 1, "B": -1, "I": -1, "W": 0}, len({t.stage for t in tasks})
    rows = [[counts[t.kind] for t in tasks if t.row == rank] for rank in range(4)]
    return ", ".join(f"{4 * max(accumulate(row)) / stages:g}" for row in rows)


def beside_one(results: Sequence[tuple], work: Work, micro: int) -> str:
    """How many of the ranks' gradients are those of one process."""
    _, alone = one_process(work, len(results), micro)
    found = (gradients for _, gradients in results)
    return within_rounding(chain(*found), chain(*alone), 1e-4)


def one_process(
    work: Work, count: int, micro: int
) -> tuple[list[float], list[list[torch.Tensor]]]:
    """All stages, one micro-batch after the other: the losses, and each stage's gradients."""
    modules, losses = [work.module(index) for index in range(count)], []
    whole = nn.Sequential(*modules)
    batch = (part.chunk(micro) for part in work.batch(micro))
    for inputs, targets in zip(*batch, strict=True):
        loss = work.loss(whole(inputs), targets) / micro
        loss.backward()
        losses.append(loss.item())
    return losses, [[p.grad for p in module.parameters()] for module in modules]
