"""What an error says of a circle, of who waits, of what was printed."""

import re
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as some

from mgpu_tutorial.lab import launch
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.lab.run import errors
from mgpu_tutorial.lab.run.errors import RankOutcome
from mgpu_tutorial.lab.run.launch import _device_of


@example([2, 0, 1])
@given(some.lists(some.none() | some.integers(0, 5), min_size=1, max_size=6))
def test_a_circle_is_told_in_its_direction_where_there_is_one_and_only_there(peers):
    """Whoever follows the waits of every rank for as many steps as there are ranks."""

    def ends(rank):
        for _ in range(len(peers) + 1):
            rank = peers[rank] if rank is not None and rank < len(peers) else None
        return rank is None

    events = [Event(rank, 0, "send", 0.0, peer=peer) for rank, peer in enumerate(peers)]
    stuck = [RankOutcome(rank, "stopped") for rank in range(len(peers))]
    said = str(errors.hang(stuck, 3, Report(len(peers), events=events))).splitlines()
    told = [line.split(": ")[1].split(" → ") for line in said if "deadlock" in line]
    assert (told == []) == all(ends(rank) for rank in range(len(peers)))
    for circle in told:
        circle = list(map(int, circle))
        assert circle[0] == circle[-1] and len(set(circle)) == len(circle) - 1
        assert [peers[rank] for rank in circle[:-1]] == circle[1:]


@pytest.mark.parametrize("went_on", [0, 1])
def test_ranks_that_are_only_slow_are_no_deadlock(went_on):
    """A look earlier one of two ranks was in a call that has come to its end since."""
    sends = [Event(rank, 4, "send", 0.0, peer=1 - rank) for rank in (0, 1)]
    stuck = [RankOutcome(rank, "stopped", waits_in="send") for rank in (0, 1)]
    report = Report(2, events=sends)
    assert "deadlock" in str(errors.hang(stuck, 3, report, earlier=sends))
    said = str(errors.hang(stuck, 3, report, earlier=[sends[1 - went_on]]))
    assert "deadlock" not in said and "Timed out" not in said
    assert f"rank {went_on} went on" in said and "2 messages" in said


def test_a_rank_that_computes_does_not_wait_for_an_answer():
    outcomes = [
        RankOutcome(0, "returned"),
        RankOutcome(1, "raised", lost_peer=True),
        RankOutcome(2, "stopped", waits_in="recv"),
        RankOutcome(3, "stopped"),
    ]
    said = str(errors.failure(outcomes, Report(world_size=4))).splitlines()
    assert said[0] == "rank 0 returned while ranks 1 and 2 still waited for an answer"


HERE = (__file__, 1, "worker")  # a place, of which errors show name, line and text


@pytest.mark.parametrize(
    "waits, lost, named",
    [
        (Event(1, 0, "recv", 0.0, peer=0), {"rank": 0, "peer": 1}, True),
        (Event(1, 0, "recv", 0.0), {"rank": 0, "peer": 1}, True),  # from anybody
        (Event(1, 0, "recv", 0.0, peer=2), {"rank": 0, "peer": 1}, False),
        (Event(2, 0, "recv", 0.0, peer=0), {"rank": 0, "peer": 1}, False),
        (Event(1, 0, "recv", 0.0, end=0.5, peer=0), {"rank": 0, "peer": 1}, False),
        (Event(1, 0, "recv", 0.0, peer=0), {"rank": 0, "peer": 1, "dropped": None}, False),
    ],
)
def test_a_transfer_that_nobody_waited_for_is_named_where_another_rank_waits_for_it(
    waits, lost, named
):
    lost = Event(index=1, op="isend", begin=0.0, **{"dropped": 1.0, "at": HERE} | lost)
    stuck = [RankOutcome(0, "returned"), RankOutcome(1, "stopped"), RankOutcome(2, "stopped")]
    said = str(errors.hang(stuck, 3, Report(3, events=[waits, lost]))).splitlines()
    place = f"{Path(__file__).name}:1"
    told = f"  rank 0 never waited for the isend at {place}"
    assert any(line.startswith(told) for line in said) is named


def test_a_wait_for_a_transfer_names_the_transfer_of_the_other_side_that_was_dropped():
    receives = Event(1, 0, "irecv", 0.0, end=0.1, peer=0, at=HERE)
    waits = Event(1, 1, "wait", 0.2, of=0)
    lost = Event(0, 0, "isend", 0.0, end=0.1, peer=1, at=HERE, dropped=0.1)
    stuck = [RankOutcome(0, "returned"), RankOutcome(1, "stopped")]
    said = str(errors.hang(stuck, 3, Report(2, events=[receives, waits, lost])))
    assert said.count("rank 0 never waited for the isend") == 1 and "irecv" not in said


@pytest.mark.parametrize(
    "meeting, says", [([0, 1], "DistStoreError"), ([1, 2], "DistNetworkError")]
)
def test_a_group_that_is_not_complete_is_told_as_pytorch_would(meeting, says):
    stuck = [RankOutcome(r, "stopped", waits_in="init_process_group") for r in meeting]
    said = str(errors.hang(stuck, 3, Report(3))).splitlines()
    assert says in said[-1] and not any("Timed out waiting" in line for line in said)


def meets_nobody(rank, world_size, alone, port):
    """Only the rank `alone` comes to the meeting, and PyTorch gives up after two seconds."""
    if rank == alone:
        limit, at = timedelta(seconds=2), f"tcp://127.0.0.1:{port}"
        try:
            dist.init_process_group("gloo", at, rank=rank, world_size=2, timeout=limit)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize("alone", [0, 1])
def test_what_is_said_of_a_real_job_is_what_pytorch_says(alone):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = launch(meets_nobody, 2, alone, port, backend="none").results[alone]
    told = errors.IN_A_MEETING[alone].partition("30 minutes: ")[2].partition(" (")[0]
    begins = re.sub(r"\d+", r"\\d+", told.removesuffix("the store"))  # its address
    assert re.match(begins, found), found


def test_each_rank_has_the_gpu_of_its_number_unless_one_is_named():
    assert [_device_of(rank, "cuda") for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [_device_of(rank, "cuda:1") for rank in range(2)] == ["cuda:1", "cuda:1"]
    assert _device_of(2, "cpu") == "cpu"


PAIRS = [[0, 2], [1, 3]]


def sends_to_its_neighbour_in_the_group(rank, world_size, how):
    group, _ = dist.new_subgroups_by_enumeration(PAIRS)
    right = (dist.get_rank(group) + 1) % 2
    if rank == 1:
        how(torch.ones(1), right, group)


@pytest.mark.parametrize(
    "how, says",
    [
        (lambda t, right, group: dist.isend(t, right), "(dst=1; did you mean group_dst?)"),
        (lambda t, right, group: dist.send(t, right), "(dst=1; did you mean group_dst?)"),
        (lambda t, right, group: dist.recv(t, right), "(src=1; did you mean group_src?)"),
        (lambda t, right, group: dist.irecv(t, group_src=1).wait(), "(group_src=1)"),
        (lambda t, right, group: dist.broadcast(t, 0, group), "the group of ranks 1 and 3"),
    ],
)
def test_a_rank_of_a_group_that_was_taken_for_one_of_the_job_is_named(how, says):
    with pytest.raises(errors.RankFailed) as caught:
        launch(sends_to_its_neighbour_in_the_group, 4, how)
    first, *_ = str(caught.value).splitlines()
    assert first.startswith("rank 1 raised") and says in first and "0x" not in first


def sends_whole_numbers(rank, world_size):
    if rank == 0:
        dist.send(torch.ones(3, dtype=torch.int64), dst=1)
    else:
        dist.recv(torch.ones(3), src=0)


def test_a_message_that_finds_no_room_is_told_in_bytes():
    with pytest.raises(errors.RankFailed, match="24 bytes came .* room for 12"):
        launch(sends_whole_numbers, 2)
