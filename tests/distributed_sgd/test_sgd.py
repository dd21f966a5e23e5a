"""N processes take the steps of one, and what the tables compare is what they say."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import nll_loss

from mgpu_tutorial.data_partitioning import global_batches
from mgpu_tutorial.distributed_sgd import figures, sgd
from mgpu_tutorial.shared.data import digits
from tests.distributed_sgd.reference import batches_of, one_process, require_equal


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_n_processes_take_the_steps_of_one(ranks, world_size):
    results = ranks(world_size, sgd.take_steps, steps=3, batch=12).results
    require_equal(results, one_process(batches_of(12)[:3]))


def test_five_steps_of_sixty_samples_are_taken_unless_told_otherwise(ranks):
    require_equal(ranks(2, sgd.take_steps).results, one_process(batches_of(60)[:5]))


def test_each_parameter_is_averaged_once_a_step(ranks):
    report = ranks(3, sgd.take_steps, steps=3, batch=12, trace=True)
    sent = [event.nbytes for event in report.events if event.rank == 0]
    assert {event.op for event in report.events} == {"all_reduce"}
    assert len(sent) == 3 * 8 and sum(sent) == 3 * 4 * 21_840


def test_a_seed_decides_the_first_parameters():
    first, again, other = (sgd.flat_parameters(sgd.new_model(seed)[0]) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)


def unequal_steps(rank, world_size, weigh, batch=7):
    data, (model, optimizer) = digits(), sgd.new_model(decay=0.1)
    for mine in global_batches(rank, world_size, len(data), batch, seed=1, epoch=0)[:3]:
        optimizer.zero_grad()
        output, labels = model(data.images[mine]), data.labels[mine]
        (
            sgd.shared_loss(output, labels, batch) if weigh else nll_loss(output, labels)
        ).backward()
        sgd.average_gradients(model)
        optimizer.step()
    return sgd.flat_parameters(model)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_unequal_shares_need_weights(ranks, world_size):
    expected = one_process(batches_of(7)[:3], decay=0.1)
    require_equal(ranks(world_size, unequal_steps, weigh=True).results, expected)
    plain = ranks(world_size, unequal_steps, weigh=False).results
    assert figures.distance(plain, expected) > 1e-5


def shifted(rank, world_size, steps=5, by=0.25):
    """Rank 1 begins elsewhere, and each step moves one process by 1 and two by 1.5."""
    place = torch.full((3,), by * rank)
    return place + steps * (0.5 + dist.get_world_size() / 2)


def test_a_comparison_tells_what_one_process_moved_and_how_far_apart_the_ranks_are():
    rows = figures.compare(shifted, steps=2).rows
    assert rows[0] == ["at the start", "0", "2e-01", "2e-01"]
    assert rows[1] == ["after step 2", "2e+00", "1e+00", "2e-01"]
    for row in figures.equality(shifted, (1, 2)).rows, figures.compare(shifted, by=0.0).rows:
        assert row[0][-1] == "0"
