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
from mgpu_tutorial.model_parallel.micro_batches import split
from mgpu_tutorial.model_parallel.split_resnet import (
    gradients,
    new_model,
    unsplit_step,
    zero_model,
)
from mgpu_tutorial.pipelines.schedules import build_pipeline, take_step
from mgpu_tutorial.pipelines.work import ResNetStages, Work
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
    image_size: int = 64,
) -> dict[str, Compared]:
    """Run ResNet-50's stages, with these weights, in the order of each schedule.

    Returns for each how far this rank's gradients are from the `expected` ones.
    """
    model, found = new_model(own=()), {}
    model.load_state_dict(weights, assign=True)
    cuts = ("layer2.0", "layer3.0", "layer4.0")
    model = model.to(torch.get_default_device())
    work = ResNetStages(cuts, image_size=image_size, model=model)
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
    work = ResNetStages(("layer3.0",), samples, image_size, model)
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


def gradients_alone(work: Work, count: int, micro: int) -> list[list[torch.Tensor]]:
    """All stages in one process, one piece after the other: the gradients of each stage."""
    modules = [work.module(index, count) for index in range(count)]
    whole = nn.Sequential(*modules)
    for inputs, targets in split(*work.batch(micro), micro):
        (work.loss(whole(inputs), targets) / micro).backward()
    return [[p.grad for p in module.parameters()] for module in modules]


def outputs_of_layers(ranks: int, pieces: int) -> list[torch.Tensor]:
    """What one process computes where an exercise has a layer on each rank."""
    layers = []
    for rank in range(ranks):
        torch.manual_seed(rank)
        layers.append(nn.Linear(4, 4))
    inputs = [torch.full((2, 4), float(i)) for i in range(pieces)]
    with torch.no_grad():
        return [nn.Sequential(*layers)(x) for x in inputs]
