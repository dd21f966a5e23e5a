"""Apparatus, not the lesson: pipelines timed and counted, and one process beside them."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from mgpu_tutorial.lab import Ledger, span
from mgpu_tutorial.model_parallel.micro_batches import split
from mgpu_tutorial.pipelines.schedules import build_pipeline
from mgpu_tutorial.pipelines.work import Work


class ScheduleResult(NamedTuple):
    """What one rank measured of a pipeline's steps.

    `seconds` of the fastest step; `saved_bytes`, the most that autograd kept for backward
    beside parameters, buffers and the batch; `loss`, the mean over the last step's
    micro-batches, 0 where another rank has the last stage.
    """

    seconds: float
    saved_bytes: int
    loss: float


def measure_schedule(
    rank: int, world_size: int, schedule: str, micro: int, work: Work, repeats: int = 2
) -> ScheduleResult:
    """Take `repeats` steps in the order of one of PyTorch's schedules, each in a span."""
    stages, runner = build_pipeline(work, schedule, micro, rank, world_size)
    inputs, targets = work.batch(micro)
    ledger, times = Ledger(), []
    ledger.add("batch", [inputs, targets])
    for stage in stages:
        mark(stage)
        ledger.record_state(stage.submod)
    for _ in range(repeats):
        for stage in stages:
            stage.submod.zero_grad()
        dist.barrier()
        # the first stage's rank puts the batch in, the last stage's rank gets the losses
        given = [inputs] if stages[0].is_first else []
        wanted = targets if stages[-1].is_last else None
        losses: list[torch.Tensor] = []
        begin = time.perf_counter()
        with span("step"), ledger.saved_for_backward():
            runner.step(*given, target=wanted, losses=losses)
        times.append(time.perf_counter() - begin)
    loss = sum(loss.item() for loss in losses) / micro
    return ScheduleResult(min(times), ledger.saved_peak(inputs.device), loss)


def measure_own(
    rank: int,
    world_size: int,
    run: Callable[[int, int, Work, int], object],
    work: Work,
    micro: int,
    repeats: int = 2,
) -> None:
    """Call `run` several times, for the chart: each time in a span, from a common start."""
    for _ in range(repeats):
        dist.barrier()
        with span("step"):
            run(rank, world_size, work, micro)


def mark(stage: PipelineStage) -> None:
    """Put a span around each forward and backward of `stage`, for the pipeline chart."""

    def wrap(name: str, kind: str) -> None:
        original = getattr(stage, name)

        def call(i: int, *args: Any, **kwargs: Any) -> Any:
            input_only = kind == "B" and not kwargs.get("full_backward", True)
            with span(f"{'I' if input_only else kind} {stage.stage_index} {i}"):
                result = original(i, *args, **kwargs)
                if torch.cuda.is_initialized():  # a GPU works on after its call returned
                    torch.cuda.synchronize()
            return result

        setattr(stage, name, call)

    wrap("forward_one_chunk", "F")
    wrap("backward_one_chunk", "B")
    wrap("backward_weight_one_chunk", "W")


def gradients_alone(work: Work, count: int, micro: int) -> list[list[torch.Tensor]]:
    """All stages in one process, one micro-batch after the other: each stage's gradients."""
    modules = [work.module(index, count) for index in range(count)]
    whole = nn.Sequential(*modules)
    for inputs, targets in split(*work.batch(micro), micro):
        (work.loss(whole(inputs), targets) / micro).backward()
    return [[p.grad for p in module.parameters()] for module in modules]
