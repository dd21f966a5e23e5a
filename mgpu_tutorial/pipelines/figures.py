"""Apparatus, not the lesson: pipelines timed and shown, and one process beside them."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.lab import frame, launch, span
from mgpu_tutorial.lab.colours import tone
from mgpu_tutorial.lab.draw.drawing import INK, Drawing
from mgpu_tutorial.lab.words import in_a_row
from mgpu_tutorial.model_parallel.figures import (
    LOOKS,
    duration,
    idle_share,
    paler,
    tasks_of,
    within_rounding,
)
from mgpu_tutorial.model_parallel.micro_batches import Task
from mgpu_tutorial.pipelines.work import Pauses, Work

GREY = "#e4e4e4"  # idle


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


def lay_out(tasks: Sequence[Task], **slots: float | Sequence[float]) -> list[Task]:
    """The same order in slots, so many for each kind of task; a list has one for each stage.

    F needs the F of the stage before, B and I those of the stage behind, W the own I.
    """
    free: Counter = Counter()  # when each row ends its latest task
    done: Counter = Counter()
    placed = []
    for task in tasks:
        kind = "I" if task.kind == "W" else task.kind
        needs = task.stage + {"F": -1, "W": 0}.get(task.kind, 1)
        begin = max(free[task.row], done[kind, needs, task.micro])
        length = slots[task.kind]
        end = begin + (length[task.stage] if isinstance(length, Sequence) else length)
        free[task.row] = done[task.kind, task.stage, task.micro] = end
        placed.append(task._replace(begin=begin, end=end))
    return placed


def tasks_in(orders: Sequence[Sequence[str]]) -> list[Task]:
    """The tasks of ranks that work in these orders, each after what it needs.

    Raises ValueError for a task that is missing or twice there, or that never comes.
    """
    for rank, order in enumerate(orders):
        micro = [name[1:] for name in order if name[0] == "F"]
        wholes = ([f"{kind}{i}" for i in micro for kind in kinds] for kinds in ("FB", "FIW"))
        if sorted(order) not in map(sorted, wholes) or len(set(micro)) < len(micro):
            raise ValueError(
                f"rank {rank} must name each micro-batch once as F, and as B, or as I and W; "
                f"its order is {' '.join(order)}"
            )
    todo, tasks, done = [list(order) for order in orders], [], set()

    def is_ready(rank: int, name: str) -> bool:
        kind, micro = name[0], name[1:]
        needs = rank + {"F": -1, "W": 0}.get(kind, 1)
        outside = needs not in range(len(orders))  # the first stage has the batch
        if kind in "BI" and ("F", rank, micro) not in done:
            return False
        return outside or ("I" if kind == "W" else kind, needs, micro) in done

    while any(todo):
        before = len(tasks)
        for rank, order in enumerate(todo):
            while order and is_ready(rank, order[0]):
                kind, micro = order[0][0], order.pop(0)[1:]
                done.add((kind, rank, micro))
                tasks.append(Task(0, 0, rank, rank, kind, int(micro)))
        if len(tasks) == before:
            rank, order = next((rank, order) for rank, order in enumerate(todo) if order)
            raise ValueError(
                f"rank {rank} never comes to {' '.join(order)}: what {order[0]} needs is "
                "done by no rank before"
            )
    return tasks


def in_slots(worker: Callable, micro: int, *given: object, **slots: int) -> list[Task]:
    """What four ranks do that compute in no time, laid out in slots."""
    work = Pauses(0.0, is_split="W" in slots)
    report = launch(worker, 4, work, micro, *given, trace=True)
    return lay_out(tasks_of(report), **slots)


def note_slots(rank: int, world_size: int, tasks: Sequence[Task]) -> None:
    """A frame for each slot: this rank's task, and the micro-batches that it holds."""
    begin = {(t.kind, t.micro): t.begin for t in tasks if t.row == rank}
    last = int(duration(tasks))
    for slot in range(last):
        now = {t.row: t for t in tasks if t.begin == slot}
        all_of = sorted({t.micro for t in tasks})
        held = {i for i in all_of if begin["F", i] <= slot <= begin["B", i]}
        bricks = {"now": ()} | {f"holds {i}": str(i) if i in held else () for i in all_of}
        came = {}
        if task := now.get(rank):
            bricks["now"] = f"{task.kind}{task.micro}"
            source = rank - 1 if task.kind == "F" else rank + 1
            if 0 <= source < world_size:
                came["now"] = source, "now"
        idle = ", ".join(f"rank {r}" for r in range(world_size) if r not in now) or "none"
        frame(f"Idle: {idle}.", bricks, came, slot, unit="slot")


def held(tasks: Sequence[Task]) -> str:
    """The most micro-batches that each rank held; a stage counts its part."""
    counts, stages = {"F": 1, "B": -1, "I": -1, "W": 0}, len({t.stage for t in tasks})
    ranks = 1 + max(t.row for t in tasks)
    rows = [[counts[t.kind] for t in tasks if t.row == rank] for rank in range(ranks)]
    return ", ".join(f"{ranks * max(accumulate(row)) / stages:g}" for row in rows)


def slot_chart(tasks: Sequence[Task]) -> Drawing:
    """A row for each rank, a box for each task, grey where it is idle, and what it holds.

    All pictures are as wide, however many slots there are, so that shares compare.
    """
    left, top, wide, high = 70, 36, 540, 176  # pixels
    most, slots, idle = held(tasks).split(", "), duration(tasks), idle_share(tasks)
    ranks, micro = len(most), len({t.micro for t in tasks})
    many = f"{micro} micro-batch{'es' * (micro > 1)}"
    alt = f"{ranks} ranks, {many}: {slots:g} slots, {idle:.0%} idle. "
    alt += f"Ranks 0 to {ranks - 1} hold at most {in_a_row(most)}."
    drawing = Drawing(left + wide + 84, top + high + 8, alt, alt)
    row, slot = min(high / ranks, 44), wide / slots
    looks = {kind: LOOKS[kind] for kind in "FBIW" if kind in {t.kind for t in tasks}}
    for i, (strength, meaning) in enumerate(looks.values()):
        drawing.box(left + 100 * i, 8, 14, 14, INK, paler(0, strength), 0.7, radius=0)
        drawing.label(left + 100 * i + 20, 20, meaning, 13, anchor="start")
    drawing.box(left + 100 * len(looks), 8, 14, 14, GREY, GREY, 0, radius=0)
    drawing.label(left + 100 * len(looks) + 20, 20, "idle", 13, anchor="start")
    head = f"{slots:g} slots, {idle:.0%} idle"
    drawing.label(left + wide, 20, head, 14, anchor="end", weight="bold")
    for rank in range(ranks):
        y, tall = top + row * rank, row - 4
        drawing.box(left, y, wide, tall, GREY, GREY, 0, radius=0)
        name = tone(rank).text, "end", "bold"
        drawing.label(left - 8, y + tall / 2 + 5, f"rank {rank}", 13, *name)
        drawing.label(
            left + wide + 8, y + tall / 2 + 5, f"holds {most[rank]}", 13, anchor="start"
        )
        for kind, (strength, _) in looks.items():
            own = [t for t in tasks if t.row == rank and t.kind == kind]
            fill, ink = paler(rank, strength), tone(rank).on if strength > 0.5 else INK
            if slot > 12 and micro < 10:  # its number fits into a box
                for t in own:
                    x, length = left + slot * t.begin, slot * (t.end - t.begin)
                    drawing.box(
                        round(x, 1), y, round(length, 1), tall, INK, fill, 0.6, radius=0
                    )
                    middle = round(x + length / 2), y + round(tall / 2) + 4
                    drawing.label(*middle, t.micro, 12, ink)
                continue
            boxes = "".join(
                f"M{left + slot * t.begin:.1f} {y:g}h{slot * (t.end - t.begin):.1f}v{tall:g}"
                f"h{-slot * (t.end - t.begin):.1f}z"
                for t in own
            )
            drawing.parts.append(
                f"<path d='{boxes}' fill='{fill}' stroke='{INK}' stroke-width='0.6'/>"
            )
    return drawing


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
