"""What an error says of a circle, of who waits, of what was printed."""

from hypothesis import example, given
from hypothesis import strategies as some

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


def test_a_rank_that_computes_does_not_wait_for_an_answer():
    outcomes = [
        RankOutcome(0, "returned"),
        RankOutcome(1, "raised", lost_peer=True),
        RankOutcome(2, "stopped", waits_in="recv"),
        RankOutcome(3, "stopped"),
    ]
    said = str(errors.failure(outcomes, Report(world_size=4))).splitlines()
    assert said[0] == "rank 0 returned while ranks 1 and 2 still waited for an answer"


def test_each_rank_has_the_gpu_of_its_number_unless_one_is_named():
    assert [_device_of(rank, "cuda") for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [_device_of(rank, "cuda:1") for rank in range(2)] == ["cuda:1", "cuda:1"]
    assert _device_of(2, "cpu") == "cpu"
