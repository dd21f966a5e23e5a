"""Transfers that run in the background, and the buffer they own."""

import time

import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial import nonblocking
from mgpu_tutorial.lab import launch


def test_irecv_returns_before_the_value_is_there_and_wait_after():
    report = launch(nonblocking.start_and_wait, 2, delay=0.4)
    assert report.stdout[1].splitlines() == [
        "irecv has returned, and the value is 0",
        "wait has returned, and the value is 1",
    ]
    in_irecv, in_wait = report.results[1]
    assert in_irecv < in_wait and in_wait > 0.1


def test_the_swap_does_not_deadlock():
    assert launch(nonblocking.exchange, 2, timeout=5).results == [1.0, 0.0]


@pytest.mark.parametrize("recv, write, arrives", [(0, 0.4, 1.0), (0.4, 0, 2.0)])
def test_an_overwritten_buffer_arrives_old_or_new(recv, write, arrives):
    report = launch(nonblocking.overwrite_early, 2, recv_after=recv, write_after=write)
    assert report.results[1] == arrives


@pytest.mark.parametrize("recv, write", [(0, 0.3), (0.3, 0)])
def test_waiting_first_delivers_what_was_sent(recv, write):
    report = launch(nonblocking.overwrite_late, 2, recv_after=recv, write_after=write)
    assert report.results[1] == 1.0


def send_and_let_go(rank, world_size, keep):
    """Rank 0 keeps or drops the work object of its send; rank 1 asks later."""
    value = torch.zeros(1000)
    sending = None
    if rank == 0:
        sending = dist.isend(torch.full((1000,), 7.0), dst=1)
        if not keep:
            sending = None
    time.sleep(0.2)
    receiving = dist.irecv(value, src=0) if rank == 1 else None
    time.sleep(0.5)
    return value.mean().item(), (sending or receiving) is not None


@pytest.mark.parametrize("keep, arrives", [(True, 7.0), (False, 0.0)])
def test_a_send_lives_as_long_as_its_work_object(keep, arrives):
    assert launch(send_and_let_go, 2, keep).results[1] == (arrives, True)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_megabyte_is_sent_once(overlap):
    report = launch(nonblocking.send_and_compute, 2, 1, overlap, trace=True)
    sent = [e for e in report.events if e.kind == "p2p"]
    assert [(e.rank, e.nbytes) for e in sorted(sent, key=lambda e: e.rank)] == [
        (0, 1_000_000),
        (1, 1_000_000),
    ]


def test_overlap_hides_the_wait():
    def computing(overlap):
        report = launch(nonblocking.send_and_compute, 2, 4000, overlap, trace=True)
        spans = [event for event in report.events if event.note == "compute"]
        return sorted(spans, key=lambda event: event.rank)

    zero, one = computing(overlap=False)
    assert one.end <= zero.begin
    zero, one = computing(overlap=True)
    assert zero.begin < one.end and one.begin < zero.end


@pytest.mark.parametrize(
    "world_size, expected",
    [
        (2, [[1.0, 1.0], [0.0, 0.0]]),
        (3, [[2.0, 1.0], [0.0, 2.0], [1.0, 0.0]]),
        (4, [[3.0, 1.0], [0.0, 2.0], [1.0, 3.0], [2.0, 0.0]]),
    ],
)
def test_neighbours_swap_in_one_batch(world_size, expected):
    assert launch(nonblocking.exchange_with_neighbours, world_size).results == expected
