"""Apparatus, not the lesson: pipelines timed and shown, and one process beside them."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from mgpu_tutorial.lab import frame, launch, span
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.model_parallel.chart import Task, duration, in_order, pipeline_steps
from mgpu_tutorial.model_parallel.figures import lay_out
from mgpu_tutorial.pipelines.schedules import build_pipeline
from mgpu_tutorial.pipelines.work import Pauses, Work


def measure_own(rank: int, world_size: int, run: Callable, *given: object) -> None:
    """Call `run` twice, for the chart: each time in a span, from a common start."""
    for _ in range(2):
        dist.barrier()
        with span("step"):
            run(rank, world_size, *given)


def measure_schedule(
    rank: int, world_size: int, schedule: str, micro: int, work: Work
) -> None:
    """Take two steps in the order of one of PyTorch's schedules, each in a span."""
    stages, runner = build_pipeline(work, schedule, micro, rank, world_size)
    for stage in stages:
        for kind, part in (("F", "forward"), ("B", "backward"), ("W", "backward_weight")):
            call = getattr(stage, f"{part}_one_chunk")
            setattr(stage, f"{part}_one_chunk", partial(in_span, stage, kind, call))
    # the first stage's rank puts the batch in, the last stage's rank needs the targets
    inputs, targets = work.batch(micro)
    given = [inputs] if stages[0].is_first else []
    wanted = targets if stages[-1].is_last else None

    def step(rank: int, world_size: int) -> None:
        for stage in stages:
            stage.submod.zero_grad()
        runner.step(*given, target=wanted)

    measure_own(rank, world_size, step)


def in_span(stage: PipelineStage, kind: str, call: Callable, i: int, *args: Any, **how: Any):
    """What `stage` does with micro-batch i, inside a span for the pipeline chart."""
    if kind == "B" and not how.get("full_backward", True):
        kind = "I"
    with span(f"{kind} {stage.stage_index} {i}"):
        result = call(i, *args, **how)
        if torch.cuda.is_initialized():  # a GPU works on after its call returned
            torch.cuda.synchronize()
    return result


def timed(worker: Callable, *given: object) -> Sequence[Task]:
    """The tasks of the faster step of four ranks: the other lost more time to programs."""
    return min(pipeline_steps(launch(worker, 4, *given, trace=True)), key=duration)


def in_slots(worker: Callable, *given: object, ranks: int = 4, micro: int = 5) -> Report:
    """Run a pipeline, and note for a film what each rank did and held in each slot.

    A slot is a forward or a backward, which here take equally long; a task begins as soon as
    its rank is free and what it waits for is done.
    """
    work = Pauses(ranks, forward=0.0)
    (tasks,) = pipeline_steps(launch(worker, ranks, work, micro, *given, trace=True))
    tasks = sorted(tasks, key=lambda task: task.begin)
    slots = lay_out(task._replace(begin=0, end=1) for task in tasks)
    return launch(note_slots, ranks, slots, trace=True)


def note_slots(rank: int, world_size: int, tasks: Sequence[Task]) -> None:
    """A frame for each slot: this rank's task, and the micro-batches that it holds."""
    micro, last = 1 + max(task.micro for task in tasks), int(duration(tasks))
    held = {}
    for slot in range(last):
        now = {task.row: task for task in tasks if task.begin == slot}
        bricks, came = {"now": ()} | {f"holds {i}": () for i in range(micro)}, {}
        if task := now.get(rank):
            bricks["now"] = f"{task.kind}{task.micro}"
            source = rank - 1 if task.kind == "F" else rank + 1
            if 0 <= source < world_size:
                came["now"] = source, "now"
            held[f"holds {task.micro}"] = str(task.micro)
        idle = ", ".join(f"rank {r}" for r in range(world_size) if r not in now) or "none"
        frame(f"Slot {slot + 1} of {last}. Idle: {idle}.", bricks | held, came, slot)
        if task and task.kind == "B":
            del held[f"holds {task.micro}"]


def held(tasks: Sequence[Task]) -> str:
    """The most micro-batches that each rank held, forward done and backward (or I) not yet.

    Of several stages each counts its part.
    """
    rows = sorted({task.row for task in tasks})
    stages = len({task.stage for task in tasks}) // len(rows)
    counts = {"F": 1, "B": -1, "I": -1, "W": 0}
    most = [max(accumulate(counts[name[0]] for name in in_order(tasks, row))) for row in rows]
    return ", ".join(f"{number / stages:g}" for number in most)


def beside_one(results: Sequence[tuple], work: Work, micro: int) -> str:
    """How many of the ranks' gradients are those of one process."""
    alone = gradients_alone(work, len(results), micro)
    near = [
        (a - b).norm() <= 1e-4 * b.norm()
        for (_, found), one in zip(results, alone, strict=True)
        for a, b in zip(found, one, strict=True)
    ]
    return f"{sum(near)} of {len(near)} gradients within rounding"


def gradients_alone(work: Work, count: int, micro: int) -> list[list[torch.Tensor]]:
    """All stages in one process, one micro-batch after the other: each stage's gradients."""
    modules = [work.module(index, count) for index in range(count)]
    whole = nn.Sequential(*modules)
    batch = (part.chunk(micro) for part in work.batch(micro))
    for inputs, targets in zip(*batch, strict=True):
        (work.loss(whole(inputs), targets) / micro).backward()
    return [[p.grad for p in module.parameters()] for module in modules]
