"""Transfers that run in the background, and the buffer they own."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

from mgpu_tutorial.nonblocking import transfers


def test_irecv_returns_before_the_value_is_there_and_wait_after(ranks):
    report = ranks(2, transfers.start_and_wait, delay=0.4)
    assert report.stdout[1].splitlines() == [
        "irecv has returned, and the value is 0",
        "wait has returned, and the value is 1",
    ]
    in_irecv, in_wait = report.results[1]
    assert in_irecv < 0.1 < 0.2 < in_wait


@pytest.mark.parametrize("recv_after, write_after, value", [(0, 0.3, 1), (0.3, 0, 2)])
def test_what_arrives_is_what_the_buffer_holds_when_it_is_asked_for(
    ranks, recv_after, write_after, value
):
    worker = transfers.overwrite_early
    assert ranks(2, worker, recv_after, write_after).results == [None, value]


def test_a_step_of_work_is_a_product_of_matrices():
    with FlopCounterMode(display=False) as counted:
        transfers.compute(3)
    assert counted.get_total_flops() == 3 * 2 * 128**3


@pytest.mark.parametrize("world_size", [2, 3])
def test_neighbours_swap_in_one_batch(ranks, world_size):
    report = ranks(world_size, transfers.exchange_with_neighbours, trace=True)
    for rank in range(world_size):
        left, right = (rank - 1) % world_size, (rank + 1) % world_size
        assert report.results[rank] == [left, right]
        calls = [(e.op, e.peer) for e in report.events if e.rank == rank]
        sends = [("isend", right), ("isend", left)]
        assert calls[:4] == [*sends, ("irecv", left), ("irecv", right)]
        assert [op for op, _ in calls[4:]] == ["wait"] * 4
