"""PyTorch's schedules do what their chart says, and compute what one process does."""

import pytest
import torch
from torch.distributed import pipelining as pp

from mgpu_tutorial.model_parallel.figures import idle_share, tasks_of
from mgpu_tutorial.pipelines import figures, schedules
from mgpu_tutorial.pipelines.work import Pauses
from tests.pipelines.linear_stages import LinearStages, expected_of

SCHEDULES = [pp.ScheduleGPipe, pp.Schedule1F1B]
SCHEDULES += [pp.ScheduleInterleaved1F1B, pp.ScheduleZBVZeroBubble]


def gradients_by_stage(rank, world_size, schedule):
    """The gradients of this rank's stages, by number."""
    indices = schedules.stages_on_rank(schedule, rank, world_size)
    work = LinearStages(len(indices) * world_size)
    torch.set_default_dtype(torch.float64)  # in this rank only
    schedules.run_schedule(rank, world_size, work, 4, schedule)
    return {i: [p.grad for p in work.stacks[i].parameters()] for i in indices}


@pytest.mark.parametrize("schedule", [*SCHEDULES, pp.ScheduleDualPipeV])
def test_pytorchs_schedules_compute_the_same_bits(ranks, schedule):
    """PyTorch divides the sum of the gradients, one process each loss: exact for 4 parts."""
    results = ranks(2, gradients_by_stage, schedule).results
    merged = {i: own for gradients in results for i, own in gradients.items()}
    found = [merged[i] for i in range(len(merged))]
    torch.testing.assert_close(found, expected_of(len(merged), 4), rtol=0, atol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bubble_of_pytorchs_order_is_the_formulas(ranks, schedule):
    is_split = schedule is pp.ScheduleZBVZeroBubble
    given = schedules.run_schedule, Pauses(0.001, is_split), 6, schedule
    tasks = tasks_of(ranks(3, *given, trace=True))
    each = len(schedules.stages_on_rank(schedule, 0, 3))
    slots = 6 * each * 3  # of work, for each rank
    staircases = 2 if is_split else 2 * 3
    expected = staircases / (slots + staircases)
    assert idle_share(figures.lay_out(tasks, F=1, B=2, I=1, W=1)) == pytest.approx(expected)
