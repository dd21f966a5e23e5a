"""PyTorch's schedules do what their chart says, and compute what one process does."""

from functools import cache, partial

import pytest
import torch

from mgpu_tutorial.lab import RankFailed, in_flight, launch, pipeline_steps
from mgpu_tutorial.pipelines import schedules
from mgpu_tutorial.pipelines.work import Pauses
from tests.model_parallel.reference import ideal_idle_share, one_process
from tests.pipelines import ranks
from tests.together import together

PIECE = 16 * 64 * 4  # bytes of a micro-batch between two pausing stages


def quick(world_size):
    return Pauses(world_size, 0.001)


CASES = {  # by the number of ranks: schedule, micro-batches, work, steps
    2: {name: (name, 4, quick(2), 1) for name in schedules.SCHEDULES}
    | {"2 pieces": ("1F1B", 2, quick(2), 1)},
    3: {name: (name, 6, quick(3), 1) for name in ("1F1B", "interleaved 1F1B")}
    | {
        "5 pieces": ("1F1B", 5, quick(3), 1),
        "GPipe": ("GPipe", 6, quick(3), 2),
        "zero bubble": ("zero bubble", 6, Pauses(3, 0.001, split_backward=True), 1),
    },
    4: {"8 pieces": ("1F1B", 8, quick(4), 1)},
}


@cache
def measured(world_size):
    """Of each case what the ranks measured, and the tasks of each step."""
    cases = CASES[world_size]
    report = launch(ranks.measure_each, world_size, list(cases.values()), trace=True)
    steps, found = iter(pipeline_steps(report)), {}
    for name, results in zip(cases, zip(*report.results, strict=True), strict=True):
        found[name] = results, [next(steps) for _ in range(cases[name][-1])]
    assert next(steps, None) is None
    return found


def linear_reference(world_size, micro):
    """The mean loss and each rank's gradients of its stack."""
    work = ranks.LinearStages(4, world_size)
    loss, _ = one_process(torch.nn.Sequential(*work.stacks), *work.batch(micro), micro)
    return loss, [[p.grad for p in stack.parameters()] for stack in work.stacks]


def test_pytorchs_schedules_compute_the_same_bits():
    """PyTorch divides the sum of the gradients, one process each loss: exact for 4 pieces."""
    names = list(schedules.SCHEDULES)
    found = launch(ranks.gradients_by_schedule, 2, names, 4).results
    for name in names:
        merged = {i: mine for result in found for i, mine in result[name].items()}
        _, expected = linear_reference(len(merged), 4)
        mine = [merged[i] for i in range(len(merged))]
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)


@cache
def repeated():
    """By schedule what each rank has after three steps."""
    names = ["GPipe", "1F1B"]
    calls = [partial(ranks.gradients_after_repeats, schedule=name) for name in names]
    calls = [partial(call, micro=4, repeats=3) for call in calls]
    return dict(zip(names, together(3, *calls), strict=True))


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_repeated_steps_leave_the_gradients_of_one(schedule):
    loss, expected = linear_reference(3, 4)
    found = repeated()[schedule]
    torch.testing.assert_close([mine for _, mine in found], expected)
    assert [rank_loss for rank_loss, _ in found] == [0, 0, pytest.approx(loss)]


def test_a_schedule_returns_the_loss_of_each_micro_batch():
    loss, _ = linear_reference(2, 4)
    first, last = launch(ranks.schedule_of_layers, 2, "1F1B", 4).results
    assert first == [] and len(last) == 4
    assert sum(last) / 4 == pytest.approx(loss)


@pytest.mark.parametrize("world_size", [2, 3])
def test_linear_layers_compute_what_they_do_in_one_process(world_size):
    x = torch.linspace(-1, 1, 128).view(16, 8)
    for rank in range(world_size):
        torch.manual_seed(rank)
        x = torch.nn.Linear(8, 8)(x)
    *others, losses = launch(schedules.run_linear_layers, world_size).results
    assert others == [[]] * (world_size - 1)
    expected = [piece.square().mean().item() for piece in x.chunk(4)]
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_every_schedule_has_the_same_loss(schedule):
    results, (tasks,) = measured(2)[schedule]
    count = 2 if schedule in ("GPipe", "1F1B") else 4
    assert {task.stage for task in tasks} == set(range(count))
    torch.manual_seed(1)
    x = torch.randn(64, 64)
    for index in range(count):
        torch.manual_seed(index)
        x = torch.nn.Linear(64, 64)(x).relu()
    loss = sum(result.loss for result in results)
    assert loss == pytest.approx(x.square().mean().item(), rel=1e-5)


def test_a_rank_pauses_as_long_in_every_schedule():
    """Two stages a rank pause half as long each; forward, input and weights one each."""
    both = [
        partial(ranks.requested_pauses, names=list(schedules.SCHEDULES), split_backward=split)
        for split in (False, True)
    ]
    calls = [partial(call, micro=4, forward=0.25) for call in both]
    for split, found in zip((False, True), together(2, *calls), strict=True):
        assert found == [[pytest.approx(3 * 4 * 0.25)] * 4] * 2, split


@pytest.mark.parametrize("world_size, micro", [(2, 2), (4, 8), (3, 5)])
def test_1f1b_keeps_as_many_micro_batches_as_stages_follow(world_size, micro):
    results, (tasks,) = measured(world_size)[f"{micro} pieces"]
    assert [in_flight(tasks, rank) for rank in range(world_size)] == [
        min(micro, world_size - rank) for rank in range(world_size)
    ]
    kept = [result.saved_bytes for result in results]
    assert kept[1:-1] == [2 * PIECE * (world_size - r) for r in range(1, world_size - 1)]
    assert kept[0] == PIECE * world_size and kept[-1] == 3 * PIECE


def test_gpipe_keeps_them_all():
    results, steps = measured(3)["GPipe"]
    assert len(steps) == 2
    for tasks in steps:
        assert [in_flight(tasks, rank) for rank in range(3)] == [6, 6, 6]
    kept = [result.saved_bytes for result in results]
    assert kept == [6 * PIECE, 12 * PIECE, 18 * PIECE]


@pytest.mark.parametrize(
    "schedule, stages", [("GPipe", 1), ("1F1B", 1), ("interleaved 1F1B", 2)]
)
def test_the_bubble_of_pytorchs_order_is_the_formulas(schedule, stages):
    """The recorded order, a forward of 1, a backward of 2, and messages that are free."""
    _, (tasks, *_) = measured(3)[schedule]
    ideal = ideal_idle_share(tasks, {"F": 1.0, "B": 2.0})
    assert ideal == pytest.approx(2 / (stages * 6 + 2))
    assert schedules.bubble(3, 6, stages) == pytest.approx(ideal)


def test_zero_bubble_leaves_only_the_staircase_at_the_ends():
    """Three equal boxes per piece and stage, without a gap; the last rank starts late."""
    _, (tasks,) = measured(3)["zero bubble"]
    ideal = ideal_idle_share(tasks, {"F": 1.0, "I": 1.0, "W": 1.0})
    assert ideal == pytest.approx(2 / (3 * 2 * 6 + 2))


def test_interleaving_refuses_what_does_not_divide_into_rounds():
    """Of m pieces on p ranks it makes m // p rounds."""
    with pytest.raises(RankFailed, match="multiple of the number of rounds"):
        launch(schedules.run_schedule, 2, "interleaved 1F1B", 5, quick(2))
    assert (
        len(launch(schedules.run_schedule, 2, "interleaved 1F1B", 3, quick(2)).results) == 2
    )


def test_fewer_micro_batches_than_ranks_are_refused_by_1f1b():
    with pytest.raises(RankFailed, match="Number of microbatches"):
        launch(schedules.run_schedule, 3, "1F1B", 2, quick(3))


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="schedule must be one of GPipe, 1F1B"):
        schedules.stages_on_rank("2F2B", 0, 2)


def test_bubbles_by_hand():
    assert schedules.bubble(1, 4) == 0 and schedules.bubble(2, 1) == 0.5
    assert schedules.bubble(4, 8) == pytest.approx(3 / 11)
    assert schedules.bubble(4, 8, stages_per_rank=2) == pytest.approx(3 / 19)
