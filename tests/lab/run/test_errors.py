"""What an error says of a circle, of a long line, of what was printed."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.lab.run import errors
from mgpu_tutorial.lab.run.errors import RankOutcome
from mgpu_tutorial.lab.run.launch import _device_of


def test_the_circle_of_a_deadlock_is_told_in_its_direction():
    """Rank 0 sends to 2, 2 to 1 and 1 to 0: nobody receives."""
    events = [Event(rank, 0, "send", 0.0, peer=(rank - 1) % 3) for rank in range(3)]
    stuck = [RankOutcome(rank, "stopped") for rank in range(3)]
    said = str(errors.hang(stuck, 3, Report(3, events=events)))
    assert "  deadlock: 0 → 2 → 1 → 0" in said.splitlines()


@given(some.lists(some.none() | some.integers(0, 5), min_size=1, max_size=6))
def test_a_circle_is_told_where_there_is_one_and_only_there(peers):
    """Whoever follows the waits of every rank for as many steps as there are ranks."""

    def ends(rank):
        for _ in range(len(peers) + 1):
            rank = peers[rank] if rank is not None and rank < len(peers) else None
        return rank is None

    circle = errors._circle(dict(enumerate(peers)))
    assert (circle == []) == all(ends(rank) for rank in range(len(peers)))
    if circle:
        assert circle[0] == circle[-1] and len(set(circle)) == len(circle) - 1
        assert [peers[rank] for rank in circle[:-1]] == circle[1:]


@pytest.mark.parametrize("length, whole", [(220, True), (221, False)])
def test_a_very_long_line_loses_its_middle(length, whole):
    message = "a" * 110 + "b" * (length - 220) + "c" * 110
    said = RankOutcome(0, "raised", type="ValueError", message=message).what()
    middle = "" if whole else " … "
    assert said == f"raised ValueError: {'a' * 110}{middle}{'c' * 110}, at an unknown line"


@pytest.mark.parametrize("count, left_out", [(10, 0), (11, 1), (1500, 1490)])
def test_the_last_ten_lines_that_a_rank_printed_are_repeated(count, left_out):
    text = "".join(f"line {n}\n" for n in range(count))
    error = errors.RankFailed("gone", Report(2, stdout=["", text]))
    lines = "\n".join(error.__notes__).splitlines()
    first = [f"rank 1 │ … {left_out:,} lines before these"] * bool(left_out)
    assert lines == first + [f"rank 1 │ line {n}" for n in range(count - 10, count)]


def test_each_rank_has_the_gpu_of_its_number_unless_one_is_named():
    assert [_device_of(rank, "cuda") for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [_device_of(rank, "cuda:1") for rank in range(2)] == ["cuda:1", "cuda:1"]
    assert _device_of(2, "cpu") == "cpu"
