"""PyTorch's schedules do what their chart says, and compute what one process does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from mgpu_tutorial.model_parallel.figures import lay_out
from mgpu_tutorial.model_parallel.tasks import Task, idle_share, in_flight, pipeline_steps
from mgpu_tutorial.pipelines import figures, schedules
from mgpu_tutorial.pipelines.work import Pauses
from tests.pipelines.linear_stages import LinearStages, expected_of

STEP = 16 * 64 * 4  # bytes of a micro-batch between two pausing stages


def gradients_by_stage(rank, world_size, schedule):
    """What `measure_schedule` returns, and the gradients of this rank's stages."""
    indices = schedules.stages_on_rank(schedule, rank, world_size)
    work = LinearStages(len(indices) * world_size)
    torch.set_default_dtype(torch.float64)  # in this rank only
    run = figures.measure_schedule(rank, world_size, schedule, 4, work, repeats=2)
    return run, {i: [p.grad for p in work.stacks[i].parameters()] for i in indices}


@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_pytorchs_schedules_compute_the_same_bits(ranks, schedule):
    """PyTorch divides the sum of the gradients, one process each loss: exact for 4 parts."""
    results = ranks(2, gradients_by_stage, schedule).results
    merged = {i: own for _, gradients in results for i, own in gradients.items()}
    loss, expected = expected_of(len(merged), 4)
    found = [merged[i] for i in range(len(merged))]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    losses = [run.loss for run, _ in results]  # the last stage of a V is on rank 0
    assert losses[schedule != "zero bubble"] == pytest.approx(loss) and min(losses) == 0
    assert min(run.seconds for run, _ in results) > 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_linear_layers_compute_what_they_do_in_one_process(ranks, world_size):
    x = torch.linspace(-1, 1, 128).view(16, 8)
    for rank in range(world_size):
        torch.manual_seed(rank)
        x = torch.nn.Linear(8, 8)(x)
    *others, losses = ranks(world_size, schedules.run_linear_layers).results
    assert others == [[]] * (world_size - 1)
    assert losses == pytest.approx([part.square().mean().item() for part in x.chunk(4)])


@given(some.integers(1, 8))
def test_every_stage_is_on_one_rank_in_rounds_or_in_a_v(n):
    stages = {
        schedule: [schedules.stages_on_rank(schedule, rank, n) for rank in range(n)]
        for schedule in schedules.SCHEDULES
    }
    assert stages["GPipe"] == stages["1F1B"] == [[rank] for rank in range(n)]
    assert stages["interleaved 1F1B"] == [[rank, n + rank] for rank in range(n)]
    assert stages["zero bubble"] == [[rank, 2 * n - 1 - rank] for rank in range(n)]
    with pytest.raises(ValueError, match="schedule must be one of GPipe, 1F1B"):
        schedules.stages_on_rank("2F2B", 0, n)


@pytest.mark.parametrize(
    ("schedule", "world_size", "micro"),
    [("1F1B", 2, 2), ("1F1B", 4, 8), ("1F1B", 3, 5), ("GPipe", 3, 6)],
)
def test_1f1b_keeps_as_many_micro_batches_as_stages_follow(
    ranks, schedule, world_size, micro
):
    call = figures.measure_schedule, schedule, micro, Pauses(world_size, 0.001), 2
    report = ranks(world_size, *call, trace=True)
    _, tasks = pipeline_steps(report)
    follow = range(world_size, 0, -1) if schedule == "1F1B" else [micro] * world_size
    assert [in_flight(tasks, rank) for rank in range(world_size)] == list(follow)
    kept = [result.saved_bytes // STEP for result in report.results]
    # the first one's input is the batch; the last one keeps its loss's input too
    assert kept == [n * (1 + (r > 0) + (r == world_size - 1)) for r, n in enumerate(follow)]


@pytest.mark.parametrize(
    ("schedule", "seconds", "expected"),
    [
        ("GPipe", {"F": 1, "B": 2}, schedules.bubble(3, 6)),
        ("1F1B", {"F": 1, "B": 2}, schedules.bubble(3, 6)),
        ("interleaved 1F1B", {"F": 1, "B": 2}, schedules.bubble(3, 6, 2)),
        # three equal boxes for each micro-batch and stage, and only a staircase at the ends
        ("zero bubble", {"F": 1, "I": 1, "W": 1}, 2 / (3 * 2 * 6 + 2)),
    ],
)
def test_the_bubble_of_pytorchs_order_is_the_formulas(ranks, schedule, seconds, expected):
    work = Pauses(3, 0.001, split_backward="W" in seconds)
    report = ranks(3, figures.measure_schedule, schedule, 6, work, 1, trace=True)
    (tasks,) = pipeline_steps(report)
    in_order = sorted(tasks, key=lambda task: task.begin)
    ideal = [t._replace(begin=0, end=seconds[t.kind]) for t in in_order]
    # a W waits for nobody: numbered so, no stage stands behind its own
    ideal = [t._replace(stage=2 * t.stage) if t.kind == "W" else t for t in ideal]
    assert idle_share(lay_out(ideal)) == pytest.approx(expected)


@given(some.integers(1, 8), some.integers(1, 9), some.integers(1, 4))
def test_the_bubble_of_gpipe_is_that_of_its_order(world_size, micro, stages_per_rank):
    rows = range(world_size)
    tasks = [Task(r, r, "F", i, 0, 1) for i in range(micro) for r in rows]
    tasks += [Task(r, r, "B", i, 0, 2) for i in range(micro) for r in reversed(rows)]
    ideal = idle_share(lay_out(tasks))
    assert schedules.bubble(world_size, micro) == pytest.approx(ideal)
    split = schedules.bubble(world_size, micro, stages_per_rank)
    assert split == schedules.bubble(world_size, stages_per_rank * micro)
