"""Our own pipelines compute what one process does, in the order that their name says."""

import pytest
import torch

from mgpu_tutorial.lab import RankFailed, traffic
from mgpu_tutorial.model_parallel.tasks import in_order, pipeline_steps
from mgpu_tutorial.pipelines import stages
from mgpu_tutorial.pipelines.work import ResNetStages
from tests.model_parallel.reference import SIDE
from tests.pipelines.linear_stages import LinearStages, expected_of

OWN = [stages.run_gpipe, stages.run_1f1b]
SIZES = [(1, 2), (2, 1), (2, 4), (3, 1), (3, 2), (3, 6), (4, 3), (4, 6)]  # fewer, more


def on_linear_stages(rank, world_size, run, micro):
    return run(rank, world_size, LinearStages(world_size), micro)


@pytest.mark.parametrize("run", OWN)
@pytest.mark.parametrize("world_size, micro", SIZES)
def test_ranks_have_the_gradients_of_one_process(ranks, run, world_size, micro):
    loss, gradients = expected_of(world_size, micro)
    results = ranks(world_size, on_linear_stages, run, micro, trace=True).results
    torch.testing.assert_close([own for _, own in results], gradients)
    assert all(losses == [] for losses, _ in results[:-1])
    losses = results[-1][0]
    assert len(losses) == micro and sum(losses) == pytest.approx(loss)


@pytest.mark.parametrize("world_size, micro", SIZES)
def test_gpipe_does_all_forwards_first(ranks, world_size, micro):
    report = ranks(world_size, on_linear_stages, stages.run_gpipe, micro, trace=True)
    (tasks,) = pipeline_steps(report)
    order = [f"{kind}{i}" for kind in "FB" for i in range(micro)]
    assert [in_order(tasks, rank) for rank in range(world_size)] == [order] * world_size


@pytest.mark.parametrize("world_size, micro", SIZES)
def test_1f1b_goes_backward_as_soon_as_it_can(ranks, world_size, micro):
    report = ranks(world_size, on_linear_stages, stages.run_1f1b, micro, trace=True)
    (tasks,) = pipeline_steps(report)
    for rank in range(world_size):
        first = min(micro, world_size - rank)
        order = [f"F{i}" for i in range(first)]
        for i in range(micro):
            order += [f"B{i}"] + [f"F{first + i}"] * (first + i < micro)
        assert in_order(tasks, rank) == order
        assert {task.stage for task in tasks if task.row == rank} == {rank}


@pytest.mark.parametrize("run", OWN)
def test_activations_and_gradients_cross_once_each(ranks, run):
    """Behind the shape of 32 bytes, twelve rows of four in two micro-batches, each way."""
    report = ranks(3, on_linear_stages, run, 2, trace=True)
    sent = 4 * (12 * 4)  # float32
    expected = [[3, sent + 32], [5, 2 * sent + 32], [2, sent]]
    assert [row[2:] for row in traffic(report).rows] == expected
    to = {(e.rank, e.peer) for e in report.events if e.sends}
    assert to == {(0, 1), (1, 0), (1, 2), (2, 1)}


def test_in_the_steady_state_a_send_does_not_block_and_is_waited_for(ranks):
    report = ranks(3, on_linear_stages, stages.run_1f1b, 6, trace=True)
    for rank, steady in ((0, 4), (1, 5), (2, 0)):
        ops = [e.op for e in report.events if e.rank == rank]
        assert ops.count("isend") == ops.count("wait") == steady


def on_resnet(rank, world_size, cuts, samples=(4, 4, 4)):
    """Each rank with cuts and a number of samples of its own, which should be the same."""
    work = ResNetStages(cuts[rank], samples[rank], image_size=SIDE)
    return stages.run_gpipe(rank, world_size, work, 2)


@pytest.mark.slow
def test_stages_of_resnet_equal_the_unsplit_model(ranks, expected):
    """Cut between two blocks of a layer, and before the last unit; two micro-batches."""
    results = ranks(3, on_resnet, [("layer2.2", "fc")] * 3, timeout=60).results
    one_loss, one = expected(2)
    merged = [gradient for _, own in results for gradient in own]
    torch.testing.assert_close(merged, list(one.values()), rtol=1e-4, atol=1e-6)
    assert sum(results[-1][0]) == pytest.approx(one_loss, rel=1e-5)


@pytest.mark.parametrize(
    "cuts, samples, says",
    [
        (("layer3.0", "layer4.0"), (4, 4), "5, 5., and stage 1 expects .2, 1024, 3, 3"),
        (("layer3.0", "layer3.0"), (4, 8), "5, 5., and stage 1 expects .4, 512, 5, 5"),
        (("layer3.0", "fc"), (4, 4), "5, 5., and stage 1 expects .2, 2048"),
        (("layer3.0", ""), (4, 4), "cannot be joined to 2 stages"),
        (("layer3.0", "layer3.0"), (5, 5), "a batch of 5 does not divide into 2"),
    ],
)
def test_stages_that_do_not_fit_together_stop_at_once(ranks, cuts, samples, says):
    with pytest.raises(RankFailed, match=says):
        ranks(2, on_resnet, [names.split() for names in cuts], samples)
