"""Apparatus, not the lesson: pipelines timed and shown, and one process beside them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from mgpu_tutorial.lab import frame, launch, span
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.model_parallel.figures import lay_out
from mgpu_tutorial.model_parallel.tasks import (
    Task,
    duration,
    fastest_step,
    in_flight,
    pipeline_steps,
)
from mgpu_tutorial.pipelines.schedules import build_pipeline
from mgpu_tutorial.pipelines.work import Pauses, Work


def measure_schedule(
    rank: int, world_size: int, schedule: str, micro: int, work: Work, repeats: int = 2
) -> None:
    """Take steps in the order of one of PyTorch's schedules, each in a span."""
    stages, runner = build_pipeline(work, schedule, micro, rank, world_size)
    inputs, targets = work.batch(micro)
    for stage in stages:
        mark(stage)
    # the first stage's rank puts the batch in, the last stage's rank needs the targets
    given = [inputs] if stages[0].is_first else []
    wanted = targets if stages[-1].is_last else None
    for _ in range(repeats):
        for stage in stages:
            stage.submod.zero_grad()
        dist.barrier()
        with span("step"):
            runner.step(*given, target=wanted)


def measure_own(rank: int, world_size: int, run: Callable, *given: object) -> None:
    """Call `run` twice, for the chart: each time in a span, from a common start."""
    for _ in range(2):
        dist.barrier()
        with span("step"):
            run(rank, world_size, *given)


def timed(worker: Callable, *given: object) -> Sequence[Task]:
    """The tasks of the faster step of four ranks: the other lost more time to programs."""
    return fastest_step(pipeline_steps(launch(worker, 4, *given, trace=True)))


def mark(stage: PipelineStage) -> None:
    """Put a span around each forward and backward of `stage`, for the pipeline chart."""

    def wrap(name: str, kind: str) -> None:
        original = getattr(stage, name)

        def call(i: int, *args: Any, **kwargs: Any) -> Any:
            is_half = kind == "B" and not kwargs.get("full_backward", True)
            with span(f"{'I' if is_half else kind} {stage.stage_index} {i}"):
                result = original(i, *args, **kwargs)
                if torch.cuda.is_initialized():  # a GPU works on after its call returned
                    torch.cuda.synchronize()
            return result

        setattr(stage, name, call)

    wrap("forward_one_chunk", "F")
    wrap("backward_one_chunk", "B")
    wrap("backward_weight_one_chunk", "W")


# Slot by slot


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


# What was held, and what one process computes


def held(tasks: Sequence[Task]) -> str:
    """The most micro-batches that each rank held; of several stages each counts its part."""
    rows = sorted({task.row for task in tasks})
    stages = len({task.stage for task in tasks}) // len(rows)
    return ", ".join(f"{in_flight(tasks, row) / stages:g}" for row in rows)


def beside_one(results: Sequence[tuple], work: Work, micro: int) -> str:
    """How many of the ranks' gradients are those of one process."""
    alone = gradients_alone(work, len(results), micro)
    pairs = [
        pair
        for (_, found), one in zip(results, alone, strict=True)
        for pair in zip(found, one, strict=True)
    ]
    near = [(a - b).norm() <= 1e-4 * b.norm() for a, b in pairs]
    return f"{sum(near)} of {len(near)} gradients within rounding"


def gradients_alone(work: Work, count: int, micro: int) -> list[list[torch.Tensor]]:
    """All stages in one process, one micro-batch after the other: each stage's gradients."""
    modules = [work.module(index, count) for index in range(count)]
    whole = nn.Sequential(*modules)
    batch = (part.chunk(micro) for part in work.batch(micro))
    for inputs, targets in zip(*batch, strict=True):
        (work.loss(whole(inputs), targets) / micro).backward()
    return [[p.grad for p in module.parameters()] for module in modules]
