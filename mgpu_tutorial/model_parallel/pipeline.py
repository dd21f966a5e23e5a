"""Pipelines across ranks: stages that pass micro-batches on, in the order of a schedule.

The schedules are PyTorch's (https://docs.pytorch.org/docs/2.13/distributed.pipelining.html).
A rank holds one stage, or two where the schedule says so. What a stage computes comes from
outside: an object with `stage`, `batch` and `loss`, such as `Pauses` here.
"""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining as pp

from mgpu_tutorial.lab import span

SCHEDULES = {
    "GPipe": pp.ScheduleGPipe,
    "1F1B": pp.Schedule1F1B,
    "interleaved 1F1B": pp.ScheduleInterleaved1F1B,
    "zero bubble": pp.ScheduleZBVZeroBubble,
}


class Work(Protocol):
    """What flows through a pipeline: its stages, its data and its loss."""

    def stage(self, index: int, count: int, micro: int) -> pp.PipelineStage:
        """Stage `index` of `count`, made for a batch in `micro` micro-batches."""

    def batch(self, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole batch: what goes into the first stage, and the targets."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean loss of a micro-batch."""


def stages_of(rank: int, world_size: int, schedule: str) -> list[int]:
    """The stages that `rank` holds: one; or two, in rounds (0 1 0 1) or in a V (0 1 1 0)."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}; got {schedule!r}")
    if schedule == "interleaved 1F1B":
        return [rank, world_size + rank]
    if schedule == "zero bubble":
        return [rank, 2 * world_size - 1 - rank]
    return [rank]


def bubble(ranks: int, micro: int, held: int = 1) -> float:
    """The idle share of p ranks with m micro-batches and v stages each: (p-1) / (v m + p-1).

    Where all stages take equally long and messages no time. Sources: GPipe,
    https://arxiv.org/abs/1811.06965; for v > 1 https://arxiv.org/abs/2104.04473.
    """
    return (ranks - 1) / (held * micro + ranks - 1)


def shortest(rank: int, world_size: int, micro: int = 4) -> list[float]:
    """One layer a rank, in the order of 1F1B; the last one returns each piece's loss."""
    torch.manual_seed(rank)
    x, target = torch.linspace(-1, 1, 128).view(16, 8), torch.zeros(16, 8)
    stage = pp.PipelineStage(nn.Linear(8, 8), rank, world_size, x.device)
    schedule = pp.Schedule1F1B(stage, micro, loss_fn=nn.functional.mse_loss)
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(x)
    elif rank == world_size - 1:
        schedule.step(target=target, losses=losses)
    else:
        schedule.step()
    return [loss.item() for loss in losses]


def scheduled(
    rank: int, world_size: int, schedule: str, micro: int, work: Work, repeats: int = 2
) -> dict[str, Any]:
    """Activations go from stage to stage and gradients back, in the order of `schedule`.

    Returns the seconds of the fastest step, the most bytes that this rank keeps for
    backward, and the mean loss of the last step (0 where another rank has the last stage).
    """
    held = stages_of(rank, world_size, schedule)
    count = len(held) * world_size
    stages = [marked(work.stage(i, count, micro)) for i in held]
    alone = len(stages) == 1
    runner = SCHEDULES[schedule](stages[0] if alone else stages, micro, loss_fn=work.loss)
    inputs, targets = work.batch(micro)
    given, wanted = [inputs] if 0 in held else [], targets if count - 1 in held else None
    kept, times = Kept(stages, inputs, targets), []
    for _ in range(repeats):
        losses: list[torch.Tensor] = []
        for stage in stages:
            stage.submod.zero_grad()
        dist.barrier()
        begin = time.perf_counter()
        with span("step"), kept.hooks():
            runner.step(*given, target=wanted, losses=losses)
        times.append(time.perf_counter() - begin)
    loss = sum(loss.item() for loss in losses) / micro
    return {"seconds": min(times), "kept": kept.peak, "loss": loss}


def marked(stage: pp.PipelineStage) -> pp.PipelineStage:
    """Put a span around each forward and backward of `stage`, for the pipeline chart."""

    def mark(name: str, kind: str) -> None:
        original = getattr(stage, name)

        def call(i: int, *args: Any, **kwargs: Any) -> Any:
            split = kind == "B" and not kwargs.get("full_backward", True)
            with span(f"{'I' if split else kind} {stage.stage_index} {i}"):
                result = original(i, *args, **kwargs)
                if torch.cuda.is_initialized():  # a GPU works on after its call returned
                    torch.cuda.synchronize()
            return result

        setattr(stage, name, call)

    mark("forward_one_chunk", "F")
    mark("backward_one_chunk", "B")
    mark("backward_weight_one_chunk", "W")
    return stage


# What a rank keeps


class Kept:
    """Counts the bytes that autograd keeps for backward: now and at most.

    Not counted are the stages' parameters and buffers, and the `data` of the whole batch.
    """

    def __init__(self, stages: Iterable[pp.PipelineStage], *data: torch.Tensor) -> None:
        self.now = self.peak = 0
        self._uses: Counter[int] = Counter()
        own = [t for stage in stages for t in stage.submod.state_dict().values()]
        self._own = {t.untyped_storage().data_ptr() for t in (*own, *data)}

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)

    def _pack(self, tensor: torch.Tensor) -> "_Held":
        return _Held(self, tensor)

    def count(self, storage: torch.UntypedStorage, step: int) -> None:
        key = storage.data_ptr()
        if key in self._own:
            return
        self._uses[key] += step
        if self._uses[key] == (step + 1) // 2:  # the first use, or after the last
            self.now += step * storage.nbytes()
            self.peak = max(self.peak, self.now)


class _Held:
    """A tensor as long as autograd holds it."""

    def __init__(self, kept: Kept, tensor: torch.Tensor) -> None:
        self.kept, self.tensor = kept, tensor
        kept.count(tensor.untyped_storage(), +1)

    def __del__(self) -> None:
        self.kept.count(self.tensor.untyped_storage(), -1)


# Stages that pause


@dataclass(frozen=True)
class Pauses:
    """Stages of a small layer that pause as long as a large one would compute.

    A rank pauses `forward` seconds in each forward and twice as long in each backward: once
    for the gradient of the input and once for those of the weights. So ranks do not compete
    for cores, and the schedule alone shows. Micro-batches are (rows, width).
    """

    forward: float = 0.02
    rows: int = 16
    width: int = 64

    def batch(self, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        shape = (micro * self.rows, self.width)
        return torch.randn(shape), torch.zeros(shape)

    def stage(self, index: int, count: int, micro: int) -> pp.PipelineStage:
        torch.manual_seed(index)
        share = self.forward * dist.get_world_size() / count
        layer = nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU(), _Pause(share))
        example = torch.empty(self.rows, self.width)
        return pp.PipelineStage(
            layer, index, count, example.device,
            input_args=example.requires_grad_(index > 0),
            output_args=example.clone().requires_grad_(),
            dw_builder=lambda: lambda: time.sleep(share),
        )  # fmt: skip

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, target)


class _Pause(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Wait.apply(x, self.seconds)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None
