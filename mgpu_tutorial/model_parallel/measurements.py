"""Only measures: seconds and bytes of the steps that the chapter's other modules take."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from mgpu_tutorial.distributed_sgd import average_flat
from mgpu_tutorial.lab import Ledger, span
from mgpu_tutorial.lab.record.pipeline_steps import duration
from mgpu_tutorial.model_parallel.micro_batches import forward_backward
from mgpu_tutorial.model_parallel.pipeline import Work, build_pipeline, take_step
from mgpu_tutorial.model_parallel.split_resnet import (
    ResNetStages,
    gradients,
    new_model,
    unsplit_step,
    zero_model,
)
from mgpu_tutorial.shared.cost_model import LARGE, Times


class Measured(NamedTuple):
    """What one rank saw of a pipeline's steps.

    `seconds` of the fastest step; `saved_bytes`, the most that autograd kept for backward
    beside parameters, buffers and the batch; `loss`, the mean over the last step's
    micro-batches, 0 where another rank has the last stage.
    """

    seconds: float
    saved_bytes: int
    loss: float


def measure_schedule(
    rank: int, world_size: int, schedule: str, micro: int, work: Work, repeats: int = 2
) -> Measured:
    """`run_schedule`, `repeats` times with the same stages, each step in a span."""
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
        begin = time.perf_counter()
        with span("step"), ledger.saved_for_backward():
            losses = take_step(stages, runner, inputs, targets)
        times.append(time.perf_counter() - begin)
    loss = sum(loss.item() for loss in losses) / micro
    return Measured(min(times), ledger.saved_peak(inputs.device), loss)


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


class Compared(NamedTuple):
    """`difference` is the largest of any gradient, absolute; the others as in Measured."""

    difference: float
    saved_bytes: int
    seconds: float


def compare_schedules(
    rank: int,
    world_size: int,
    schedules: Sequence[str],
    weights: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    micro: int = 4,
) -> dict[str, Compared]:
    """Run ResNet-50's stages, with these weights, in the order of each schedule.

    Returns for each how far this rank's gradients are from the `expected` ones.
    """
    model, found = new_model(own=()), {}
    model.load_state_dict(weights, assign=True)
    work = ResNetStages(model.to(torch.get_default_device()))
    for schedule in schedules:
        model.zero_grad()
        run = measure_schedule(rank, world_size, schedule, micro, work, repeats=1)
        difference = largest_difference(gradients(model), expected)
        found[schedule] = Compared(difference, run.saved_bytes, run.seconds)
    return found


def largest_difference(
    mine: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> float:
    """Of any number in the tensors of `mine` from that of the same name, absolute."""
    return max((expected[name] - values).abs().max().item() for name, values in mine.items())


def fastest(action: Callable[[], object], repeats: int = 1) -> float:
    """Seconds from a common start until all ranks have done `action`: the best time."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        action()
        dist.barrier()
        times.append(time.perf_counter() - begin)
    return min(times)


def time_plans(rank: int, world_size: int, samples: int = 4, image_size: int = 64) -> Times:
    """Time a step of ResNet-50 on rank 0 alone, on replicas, and on a stage for each rank."""
    model = zero_model()
    work = ResNetStages(model, ("layer3.0",), samples, image_size)
    images, labels = work.batch(1)

    def step(begin: int, end: int) -> None:
        model.zero_grad()
        unsplit_step(model, images[begin:end], labels[begin:end], 1)

    def step_of_rank_0(end: int) -> None:
        if rank == 0:  # the others only wait
            step(0, end)

    def step_of_replica() -> None:
        step(rank * samples // world_size, (rank + 1) * samples // world_size)
        average_flat(model)

    step(0, samples)  # the first step allocates, and does not count
    return Times(
        small_all_reduce=fastest(lambda: dist.all_reduce(torch.ones(1)), 5),
        large_all_reduce=fastest(lambda: dist.all_reduce(torch.ones(LARGE)), 5),
        one_sample=fastest(lambda: step_of_rank_0(1)),
        one_rank=fastest(lambda: step_of_rank_0(samples)),
        replicas=fastest(step_of_replica),
        stages=measure_schedule(rank, world_size, "GPipe", 1, work, repeats=1).seconds,
    )


def sweep(
    model: nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    micros: Sequence[int],
    repeats: int = 5,
) -> dict[int, list[float]]:
    """Seconds of a step for each number of micro-batches, all in turns, `repeats` times."""
    times: dict[int, list[float]] = {micro: [] for micro in micros}
    for _ in range(repeats):
        for micro in micros:
            model.zero_grad()
            _, tasks = forward_backward(model, images, labels, micro)
            times[micro].append(duration(tasks))
    return times
