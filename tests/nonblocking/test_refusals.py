"""An exchange with two neighbours, and a transfer of one message."""

import pytest
import torch

from mgpu_tutorial.nonblocking import transfers


@pytest.mark.parametrize("count", [2, 3, 5])
def test_what_goes_right_comes_from_the_left(count, ranks):
    expected = [[100 + (r - 1) % count, 200 + (r + 1) % count] for r in range(count)]
    assert ranks(count, transfers.exchange_with_neighbours).results == expected


def work_on_ones(rank, world_size):
    return transfers.work_meanwhile(torch.ones(1), lambda: "done")


def test_a_transfer_is_one_message(ranks):
    report = ranks(2, work_on_ones, trace=True)
    sent = [(event.rank, event.op) for event in report.events if event.op != "wait"]
    assert sorted(sent) == [(0, "isend"), (1, "irecv")]
    assert report.results == ["done", "done"]
