"""Transfers that run in the background, and the buffer they own."""

import pytest
import torch

from mgpu_tutorial import nonblocking
from mgpu_tutorial.lab import launch


def test_the_value_is_there_after_wait():
    report = launch(nonblocking.start_and_wait, 2)
    assert [text.splitlines()[-1] for text in report.stdout] == ["after wait: 1"] * 2


def test_the_swap_does_not_deadlock():
    assert launch(nonblocking.exchange, 2, timeout=5).results == [1.0, 0.0]


@pytest.mark.parametrize("late, arrives", [(False, 1.0), (True, 2.0)])
def test_an_overwritten_buffer_arrives_old_or_new(late, arrives):
    assert launch(nonblocking.overwritten, 2, receiver_is_late=late).results[1] == arrives


@pytest.mark.parametrize("late", [False, True])
def test_waiting_first_delivers_what_was_sent(late):
    assert launch(nonblocking.waited, 2, receiver_is_late=late).results[1] == 1.0


def test_overlap_hides_the_wait():
    def computing(worker):
        events = launch(worker, 2, 4000, trace=True).events
        return sorted((e for e in events if e.note == "compute"), key=lambda e: e.rank)

    zero, one = computing(nonblocking.blocked)
    assert one.end <= zero.begin
    zero, one = computing(nonblocking.overlapped)
    assert zero.begin < one.end and one.begin < zero.end


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_neighbours_swap_in_one_batch(world_size):
    numbers = torch.arange(float(world_size))
    expected = torch.stack([numbers.roll(1), numbers.roll(-1)], dim=1)
    assert launch(nonblocking.neighbours, world_size).results == expected.tolist()
