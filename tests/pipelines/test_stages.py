"""Our own pipelines compute what one process does, in the order that their name says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.model_parallel.tasks import in_order, pipeline_steps
from mgpu_tutorial.pipelines import stages
from mgpu_tutorial.pipelines.work import ResNetStages
from tests.model_parallel.reference import one_process
from tests.pipelines.linear_stages import LinearStages, expected_of

OWN = [stages.run_gpipe, stages.run_1f1b]
SIZES = [(1, 2), (2, 1), (3, 2), (3, 6), (4, 3), (4, 6)]  # micro-batches: fewer, more


def on_linear_stages(rank, world_size, run, micro):
    work = LinearStages(world_size)
    torch.set_default_dtype(torch.float64)  # of what is received; in this rank only
    return run(rank, world_size, work, micro)


@pytest.mark.parametrize("run", OWN)
@pytest.mark.parametrize("world_size, micro", SIZES)
def test_ranks_have_the_gradients_of_one_process(ranks, run, world_size, micro):
    loss, gradients = expected_of(world_size, micro)
    results = ranks(world_size, on_linear_stages, run, micro, trace=True).results
    torch.testing.assert_close([own for _, own in results], gradients, rtol=0, atol=1e-12)
    assert all(losses == [] for losses, _ in results[:-1])
    losses = results[-1][0]
    assert len(losses) == micro and sum(losses) == pytest.approx(loss)


def order_by_hand(rank, world_size, micro):
    """p - r forwards, then a backward and a forward in turns, as long as there are any."""
    first = min(micro, world_size - rank)
    order = [f"F{i}" for i in range(first)]
    for i in range(micro):
        order += [f"B{i}"] + [f"F{first + i}"] * (first + i < micro)
    return order


@given(some.integers(1, 9), some.integers(1, 12))
def test_the_order_of_1f1b_is_the_one_by_hand(world_size, micro):
    for rank in range(world_size):
        expected = order_by_hand(rank, world_size, micro)
        assert stages.order_of_1f1b(rank, world_size, micro) == expected


@pytest.mark.parametrize("run", OWN)
@pytest.mark.parametrize("world_size, micro", SIZES)
def test_a_rank_works_in_the_order_of_its_name(ranks, run, world_size, micro):
    report = ranks(world_size, on_linear_stages, run, micro, trace=True)
    (tasks,) = pipeline_steps(report)
    for rank in range(world_size):
        order = [f"{kind}{i}" for kind in "FB" for i in range(micro)]
        if run is stages.run_1f1b:
            order = order_by_hand(rank, world_size, micro)
        assert in_order(tasks, rank) == order
        assert {task.stage for task in tasks if task.row == rank} == {rank}


@pytest.mark.parametrize("run", OWN)
def test_activations_and_gradients_cross_once_each(ranks, run):
    """Twelve rows of four in float64, in six micro-batches, each way."""
    report = ranks(3, on_linear_stages, run, 6, trace=True)
    sent = {}
    for event in (e for e in report.events if e.sends):
        sent.setdefault((event.rank, event.peer), []).append(event.nbytes)
    each = [12 * 4 * 8 // 6] * 6
    assert sent == {(0, 1): each, (1, 0): each, (1, 2): each, (2, 1): each}


def test_in_the_steady_state_a_send_does_not_block_and_is_waited_for(ranks):
    report = ranks(3, on_linear_stages, stages.run_1f1b, 6, trace=True)
    for rank, steady in ((0, 4), (1, 5), (2, 0)):
        ops = [e.op for e in report.events if e.rank == rank]
        assert ops.count("isend") == ops.count("wait") == steady


def on_resnet(rank, world_size, cuts, samples=(4, 4, 4)):
    """Each rank with cuts and a number of samples of its own, which should be the same."""
    work = ResNetStages(cuts[rank], samples[rank], image_size=40)
    return stages.run_gpipe(rank, world_size, work, 2)


@pytest.mark.slow
def test_stages_of_resnet_equal_the_unsplit_model(ranks):
    """Cut between two blocks of a layer, and before the last unit; two micro-batches."""
    cuts = ("layer2.2", "fc")
    results = ranks(3, on_resnet, [cuts] * 3, timeout=60).results
    work = ResNetStages(cuts, 4, image_size=40)
    whole = torch.nn.Sequential(*(work.module(index, 3) for index in range(3)))
    one_loss, one = one_process(whole, *work.batch(2), 2)
    merged = [gradient for _, own in results for gradient in own]
    torch.testing.assert_close(merged, list(one.values()), rtol=1e-4, atol=1e-6)
    assert len(merged) == 161 and sum(results[-1][0]) == pytest.approx(one_loss, rel=1e-5)


@pytest.mark.parametrize(
    "cuts, samples, says",
    [
        (("layer3.0", "layer4.0"), (4, 4), "5, 5., and stage 1 expects .2, 1024, 3, 3"),
        (("layer3.0", "layer3.0"), (4, 8), "5, 5., and stage 1 expects .4, 512, 5, 5"),
        (("layer3.0", "fc"), (4, 4), "5, 5., and stage 1 expects .2, 2048"),
        (("layer3.0", "layer3.0 fc"), (4, 4), "make 3 stages"),
        (("layer3.0", "layer3.0"), (5, 5), "a batch of 5 does not divide into 2"),
    ],
)
def test_stages_that_do_not_fit_together_stop_at_once(ranks, cuts, samples, says):
    with pytest.raises(RankFailed, match=says):
        ranks(2, on_resnet, [names.split() for names in cuts], samples)
