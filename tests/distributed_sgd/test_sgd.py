"""N processes take the steps of one."""

import pytest

from mgpu_tutorial.distributed_sgd import sgd
from tests.distributed_sgd.reference import batches_of, one_process, require_equal


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_n_processes_take_the_steps_of_one(ranks, world_size):
    results = ranks(world_size, sgd.take_steps, steps=3, batch=12).results
    require_equal(results, one_process(batches_of(12)[:3]))


def test_each_parameter_is_averaged_once_a_step(ranks):
    report = ranks(3, sgd.take_steps, steps=3, batch=12, trace=True)
    sent = [event.nbytes for event in report.events if event.rank == 0]
    assert {event.op for event in report.events} == {"all_reduce"}
    assert len(sent) == 3 * 8 and sum(sent) == 3 * 4 * 21_840
