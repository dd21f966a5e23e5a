"""PyTorch's schedules: https://docs.pytorch.org/docs/2.13/distributed.pipelining.html.

A rank has one stage, or two where the schedule says so.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining as pp

from mgpu_tutorial.pipelines.work import Work

SCHEDULES = {
    "GPipe": pp.ScheduleGPipe,
    "1F1B": pp.Schedule1F1B,
    "interleaved 1F1B": pp.ScheduleInterleaved1F1B,
    "zero bubble": pp.ScheduleZBVZeroBubble,
}


def stages_on_rank(schedule: str, rank: int, world_size: int) -> list[int]:
    """The stages that `rank` has: one; or two, in rounds (0 1 0 1) or in a V (0 1 1 0)."""
    second = {"interleaved 1F1B": world_size + rank, "zero bubble": 2 * world_size - 1 - rank}
    return [rank, second[schedule]] if schedule in second else [rank]


def run_linear_layers(rank: int, world_size: int, micro: int = 4) -> list[float]:
    """One layer per rank, in the order of 1F1B; the last rank returns the losses."""
    torch.manual_seed(rank)
    x, target = torch.linspace(-1, 1, 128).view(16, 8), torch.zeros(16, 8)
    stage = pp.PipelineStage(nn.Linear(8, 8), rank, world_size, x.device)
    schedule = pp.Schedule1F1B(stage, micro, loss_fn=nn.functional.mse_loss)
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=target, losses=losses)
    return [loss.item() for loss in losses]


def build_pipeline(
    work: Work, schedule: str, micro: int, rank: int, world_size: int
) -> tuple[list[pp.PipelineStage], Any]:
    """The stages of this rank, which know their shapes, and PyTorch's schedule over them."""
    indices = stages_on_rank(schedule, rank, world_size)
    count = len(indices) * world_size
    stages = []
    for index in indices:
        module = work.module(index, count)
        goes_in = torch.empty(*work.shape(index, count, micro)).requires_grad_(index > 0)
        comes_out = torch.empty(*work.shape(index + 1, count, micro)).requires_grad_()
        shapes = {"input_args": goes_in, "output_args": comes_out}
        shapes["dw_builder"] = getattr(module, "dw_builder", None)
        stages.append(pp.PipelineStage(module, index, count, goes_in.device, **shapes))
    runs = stages if len(stages) > 1 else stages[0]
    return stages, SCHEDULES[schedule](runs, micro, loss_fn=work.loss)
