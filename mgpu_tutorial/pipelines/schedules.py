"""PyTorch's schedules: https://docs.pytorch.org/docs/2.14/distributed.pipelining.html."""

import torch
from torch import nn
from torch.distributed import pipelining as pp

from mgpu_tutorial.model_parallel.micro_batches import equal_parts
from mgpu_tutorial.pipelines.stages import require_work
from mgpu_tutorial.pipelines.work import Work
from mgpu_tutorial.shared.losses import require_mean_of_parts


def run_linear_layers(rank: int, world_size: int, micro: int = 4) -> list[float]:
    """One layer per rank, in the order of 1F1B; the last rank returns the losses."""
    if not 2 <= world_size <= micro or 16 % micro:
        wanted = "2 ranks or more, and micro-batches for each, into which 16 rows divide"
        raise ValueError(f"expected {wanted}, got {world_size} ranks and micro={micro}")
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


def stages_on_rank(schedule: type, rank: int, world_size: int) -> list[int]:
    """The stages that `rank` has: one; or two, in rounds (0 1 0 1) or in a V (0 1 1 0)."""
    if rank not in range(world_size):
        raise ValueError(f"there is no rank {rank} of {world_size}: they count from 0")
    rounds, v = pp.ScheduleInterleaved1F1B, pp.ScheduleZBVZeroBubble
    second = {rounds: world_size + rank, v: 2 * world_size - 1 - rank}
    return [rank, second[schedule]] if schedule in second else [rank]


def run_schedule(rank: int, world_size: int, work: Work, micro: int, schedule: type) -> None:
    """One step of `work` in the order of a schedule of PyTorch's."""
    require_work(work)
    indices = stages_on_rank(schedule, rank, world_size)
    count, stages = len(indices) * world_size, []
    parts = equal_parts(*work.batch(micro), micro)
    require_mean_of_parts(work.loss, work.shape(count, micro), parts)
    for index in indices:
        module = work.module(index)
        goes_in = torch.empty(*work.shape(index, micro), requires_grad=index > 0)
        comes_out = torch.empty(*work.shape(index + 1, micro), requires_grad=True)
        known = goes_in.device, goes_in, comes_out
        dw_builder = getattr(module, "dw_builder", None)
        stages.append(pp.PipelineStage(module, index, count, *known, dw_builder=dw_builder))
    runner = schedule(stages if len(stages) > 1 else stages[0], micro, loss_fn=work.loss)
    inputs, targets = work.batch(micro)
    given = [inputs] if rank == 0 else []
    runner.step(*given, target=targets)
