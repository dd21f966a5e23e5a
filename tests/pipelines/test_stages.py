"""Our own pipelines compute what one process does, in the order that their name says."""

from functools import partial

import pytest
import torch

from mgpu_tutorial.lab import (
    RankFailed,
    RanksHung,
    in_flight,
    in_order,
    launch,
    pipeline_steps,
    traffic,
)
from mgpu_tutorial.pipelines import measurements, stages
from mgpu_tutorial.pipelines.work import Pauses, ResNetStages
from tests.model_parallel.reference import one_process
from tests.pipelines import ranks
from tests.thorough import again, thorough
from tests.together import together

OWN = [stages.run_gpipe, stages.run_1f1b]


@pytest.mark.parametrize("world_size, micro", [(1, 2), (2, 4), (3, 2), again(4, 6)])
def test_every_number_of_ranks_and_pieces_has_the_gradients_of_one_process(world_size, micro):
    work = ranks.LinearStages(4, world_size)
    loss, _ = one_process(torch.nn.Sequential(*work.stacks), *work.batch(micro), micro)
    expected = [[p.grad for p in stack.parameters()] for stack in work.stacks]
    calls = [partial(ranks.own_gradients, run=run, micro=micro) for run in OWN]
    for found in together(world_size, *calls):
        torch.testing.assert_close([mine for _, mine in found], expected)
        assert sum(found[-1][0]) == pytest.approx(loss) and len(found[-1][0]) == micro
        assert all(losses == [] for losses, _ in found[:-1])


@thorough
def test_stages_of_resnet_equal_the_unsplit_model(expected):
    """Cut between two blocks of a layer, and before the last unit; two pieces."""
    report = launch(ranks.on_cut_stages, 3, ("layer2.2", "fc"), 2, timeout=60)
    one_loss, one = expected(2)
    merged = [gradient for _, mine in report.results for gradient in mine]
    assert len(merged) == 161
    torch.testing.assert_close(merged, list(one.values()), rtol=1e-4, atol=1e-6)
    assert sum(report.results[-1][0]) == pytest.approx(one_loss, rel=1e-5)


def test_activations_and_gradients_cross_once_each():
    """Behind the shape of 32 bytes, twelve rows of four in two pieces, each way."""
    report = launch(ranks.own_gradients, 2, stages.run_gpipe, 2, trace=True)
    sent = 4 * (12 * 4)  # float32
    assert [row[2:] for row in traffic(report).rows] == [[3, sent + 32], [2, sent]]


@pytest.mark.parametrize("world_size, micro", [(2, 2), (4, 6), (3, 2)])
def test_1f1b_goes_backward_as_soon_as_it_can(world_size, micro):
    given = stages.run_1f1b, Pauses(world_size, 0.001), micro, 1
    report = launch(measurements.measure_own, world_size, *given, trace=True)
    (tasks,) = pipeline_steps(report)
    for rank in range(world_size):
        first = min(micro, world_size - rank)
        order = [f"F{i}" for i in range(first)]
        for i in range(micro):
            order += [f"B{i}"] + [f"F{first + i}"] * (first + i < micro)
        assert in_order(tasks, rank) == order
        assert in_flight(tasks, rank) == first


def test_gpipe_does_all_forwards_first():
    given = stages.run_gpipe, Pauses(2, 0.001), 3, 2
    report = launch(measurements.measure_own, 2, *given, trace=True)
    for tasks in pipeline_steps(report):
        assert (
            in_order(tasks, 0) == in_order(tasks, 1) == ["F0", "F1", "F2", "B0", "B1", "B2"]
        )


def test_sends_that_wait_for_each_other_hang():
    with pytest.raises(RanksHung) as caught:
        given = Pauses(2, 0.001), 3, stages.send_and_then_receive
        launch(stages.run_1f1b, 2, *given, timeout=3)
    assert str(caught.value).count("dist.send") == 2


def test_stages_that_disagree_on_shapes_stop_at_once():
    with pytest.raises(RankFailed) as caught:
        launch(stages.run_stages_cut_differently, 2)
    assert "stage 0 sends [4, 512, 8, 8], and stage 1 expects [4, 1024, 4, 4]" in str(
        caught.value
    )


def test_stages_and_ranks_must_be_as_many():
    with pytest.raises(RankFailed, match="cannot be joined to 3 stages"):
        launch(stages.run_gpipe, 3, ResNetStages(), 1)
    with pytest.raises(ValueError, match="cannot be joined to 2 stages"):
        ResNetStages(("layer2.0", "layer3.0")).shape(0, 2, 1)


def test_a_batch_that_does_not_divide_is_refused_on_every_rank():
    with pytest.raises(RankFailed, match="a batch of 12 does not divide into 5"):
        launch(ranks.own_gradients, 2, stages.run_gpipe, 5)
