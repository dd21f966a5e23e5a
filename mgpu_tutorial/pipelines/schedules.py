"""PyTorch's schedules: https://docs.pytorch.org/docs/2.14/distributed.pipelining.html."""

import torch
from torch.distributed import pipelining as pp

from mgpu_tutorial.pipelines.work import Work


def stages_on_rank(schedule: type, rank: int, world_size: int) -> list[int]:
    """The stages that `rank` has: one; or two, in rounds (0 1 0 1) or in a V (0 1 1 0)."""
    last = 2 * world_size - 1
    second = {
        pp.ScheduleInterleaved1F1B: world_size + rank,
        pp.ScheduleZBVZeroBubble: last - rank,
        pp.ScheduleDualPipeV: last - rank,
    }
    return [rank, second[schedule]] if schedule in second else [rank]


def run_schedule(rank: int, world_size: int, work: Work, micro: int, schedule: type) -> None:
    """One step of `work` in the order of a schedule of PyTorch's."""
    indices = stages_on_rank(schedule, rank, world_size)
    count, stages = len(indices) * world_size, []
    # a stage for each of this rank's parts of the model, with the shapes at its borders
    for index in indices:
        module = work.module(index)
        goes_in = torch.empty(*work.shape(index, micro), requires_grad=index > 0)
        comes_out = torch.empty(*work.shape(index + 1, micro), requires_grad=True)
        known = goes_in.device, goes_in, comes_out
        dw_builder = getattr(module, "dw_builder", None)
        stages.append(pp.PipelineStage(module, index, count, *known, dw_builder=dw_builder))
    # the schedule cuts the batch: rank 0 gives the inputs, and the last one needs the targets
    runner = schedule(stages if len(stages) > 1 else stages[0], micro, loss_fn=work.loss)
    inputs, targets = work.batch(micro)
    given = [inputs] if rank == 0 else []
    runner.step(*given, target=targets)
