"""PyTorch's schedules do what their chart says, and compute what one process does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.model_parallel.split_resnet import new_resnet50
from mgpu_tutorial.model_parallel.tasks import Task, in_flight, pipeline_steps
from mgpu_tutorial.pipelines import figures, schedules
from mgpu_tutorial.pipelines.work import Pauses, ResNetStages
from tests.model_parallel.reference import SIDE, ideal_idle_share
from tests.pipelines.linear_stages import LinearStages, expected_of

STEP = 16 * 64 * 4  # bytes of a micro-batch between two pausing stages
WORLD = some.integers(1, 8)


def gradients_by_stage(rank, world_size, schedule, micro, repeats=1):
    """What `measure_schedule` returns, and the gradients of this rank's stages."""
    indices = schedules.stages_on_rank(schedule, rank, world_size)
    work = LinearStages(len(indices) * world_size)
    run = figures.measure_schedule(rank, world_size, schedule, micro, work, repeats)
    return run, {i: [p.grad for p in work.stacks[i].parameters()] for i in indices}


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_pytorchs_schedules_compute_the_same_bits(ranks, schedule, repeats):
    """PyTorch divides the sum of the gradients, one process each loss: exact for 4 parts."""
    results = ranks(2, gradients_by_stage, schedule, 4, repeats).results
    merged = {i: own for _, gradients in results for i, own in gradients.items()}
    loss, expected = expected_of(len(merged), 4)
    torch.testing.assert_close(
        [merged[i] for i in range(len(merged))], expected, rtol=0, atol=0
    )
    losses = [run.loss for run, _ in results]
    assert sorted(losses) == [0, pytest.approx(loss)]
    assert losses.index(0) == (1 if schedule == "zero bubble" else 0)
    assert min(run.seconds for run, _ in results) > 0


def on_resnet(rank, world_size, names, image_size):
    """By schedule the gradients that this rank has, and the bytes that it kept."""
    results = {}
    for schedule in names:
        model = new_resnet50()
        cuts = ("layer2.0", "layer3.0", "layer4.0")
        work = ResNetStages(cuts, image_size=image_size, model=model)
        run = figures.measure_schedule(rank, world_size, schedule, 2, work, 1)
        own = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results[schedule] = own, run.saved_bytes
    return results


@pytest.mark.slow
def test_schedules_compute_the_same_on_the_stages_of_resnet(ranks, expected):
    names = ["GPipe", "1F1B", "zero bubble"]
    results = ranks(2, on_resnet, names, SIDE, timeout=60).results
    for name in names:
        merged = results[0][name][0] | results[1][name][0]
        torch.testing.assert_close(merged, expected(2)[1], rtol=0, atol=0)
    for rank in (0, 1):  # GPipe keeps 2 micro-batches, 1F1B 2 - rank of them
        gpipe, one = (results[rank][name][1] for name in names[:2])
        assert one < gpipe * (2 - rank) / 2 * 1.05


@pytest.mark.parametrize("world_size", [2, 3])
def test_linear_layers_compute_what_they_do_in_one_process(ranks, world_size):
    x = torch.linspace(-1, 1, 128).view(16, 8)
    for rank in range(world_size):
        torch.manual_seed(rank)
        x = torch.nn.Linear(8, 8)(x)
    *others, losses = ranks(world_size, schedules.run_linear_layers).results
    assert others == [[]] * (world_size - 1)
    expected = [part.square().mean().item() for part in x.chunk(4)]
    assert losses == pytest.approx(expected, rel=1e-5)


@given(WORLD)
def test_every_stage_is_on_one_rank_and_pytorch_knows_which(world_size):
    for schedule in schedules.SCHEDULES:
        indices = [
            schedules.stages_on_rank(schedule, r, world_size) for r in range(world_size)
        ]
        per_rank = len(indices[0])
        assert sorted(sum(indices, [])) == list(range(per_rank * world_size))
        for rank, own in enumerate(indices):
            assert own[0] == rank
            if schedule == "zero bubble":  # in a V: first and last on rank 0
                assert own[1] == 2 * world_size - 1 - rank
            elif per_rank == 2:  # in rounds
                assert own[1] == rank + world_size


def measured(ranks, world_size, schedule, micro, repeats=1, split=False):
    """The bytes that each rank kept, and the tasks of the last of its pausing steps."""
    work = Pauses(world_size, 0.001, split_backward=split)
    report = ranks(
        world_size, figures.measure_schedule, schedule, micro, work, repeats, trace=True
    )
    steps = pipeline_steps(report)
    assert len(steps) == repeats
    return [result.saved_bytes for result in report.results], steps[-1]


@pytest.mark.parametrize("world_size, micro", [(2, 2), (4, 8), (3, 5)])
def test_1f1b_keeps_as_many_micro_batches_as_stages_follow(ranks, world_size, micro):
    kept, tasks = measured(ranks, world_size, "1F1B", micro)
    held = [in_flight(tasks, rank) for rank in range(world_size)]
    assert held == [min(micro, world_size - rank) for rank in range(world_size)]
    assert kept[1:-1] == [2 * STEP * (world_size - r) for r in range(1, world_size - 1)]
    assert kept[0] == STEP * world_size and kept[-1] == 3 * STEP


def test_gpipe_keeps_them_all(ranks):
    kept, tasks = measured(ranks, 3, "GPipe", 6, repeats=2)
    assert [in_flight(tasks, rank) for rank in range(3)] == [6, 6, 6]
    assert kept == [6 * STEP, 12 * STEP, 18 * STEP]


@pytest.mark.parametrize(
    "schedule, stages", [("GPipe", 1), ("1F1B", 1), ("interleaved 1F1B", 2)]
)
def test_the_bubble_of_pytorchs_order_is_the_formulas(ranks, schedule, stages):
    """The recorded order, a forward of 1, a backward of 2, and messages that are free."""
    _, tasks = measured(ranks, 3, schedule, 6)
    ideal = ideal_idle_share(tasks, {"F": 1.0, "B": 2.0})
    assert ideal == pytest.approx(2 / (stages * 6 + 2))
    assert schedules.bubble(3, 6, stages) == pytest.approx(ideal)
    assert len(tasks) == 3 * stages * 6 * 2


def test_zero_bubble_leaves_only_the_staircase_at_the_ends(ranks):
    """Three equal boxes a micro-batch and stage, without a gap; the last rank starts late."""
    _, tasks = measured(ranks, 3, "zero bubble", 6, split=True)
    ideal = ideal_idle_share(tasks, {"F": 1.0, "I": 1.0, "W": 1.0})
    assert ideal == pytest.approx(2 / (3 * 2 * 6 + 2))
    assert len(tasks) == 3 * 2 * 6 * 3


@given(WORLD, some.integers(1, 9), some.integers(1, 4))
def test_the_bubble_of_gpipe_is_that_of_its_order(world_size, micro, stages_per_rank):
    tasks = [
        Task(rank, rank, kind, i, 2 * i + 100 * (kind == "B"), 0)
        for rank in range(world_size)
        for kind in "FB"
        for i in range(micro)
    ]
    ideal = ideal_idle_share(tasks, {"F": 1.0, "B": 2.0})
    assert schedules.bubble(world_size, micro) == pytest.approx(ideal)
    split = schedules.bubble(world_size, micro, stages_per_rank)
    assert split == pytest.approx(schedules.bubble(world_size, stages_per_rank * micro))


def test_interleaving_refuses_what_does_not_divide_into_rounds(ranks):
    """Of m micro-batches on p ranks it makes m // p rounds."""
    with pytest.raises(RankFailed, match="multiple of the number of rounds"):
        measured(ranks, 2, "interleaved 1F1B", 5)
    measured(ranks, 2, "interleaved 1F1B", 3)


def test_fewer_micro_batches_than_ranks_are_refused_by_1f1b(ranks):
    with pytest.raises(RankFailed, match="Number of microbatches"):
        measured(ranks, 3, "1F1B", 2)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="schedule must be one of GPipe, 1F1B"):
        schedules.stages_on_rank("2F2B", 0, 2)
