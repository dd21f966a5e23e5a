"""What is measured is what its name says: orders, messages and bytes, and no times."""

import torch

from mgpu_tutorial.lab import launch
from mgpu_tutorial.pipelines import measurements
from tests.model_parallel.reference import SIDE
from tests.thorough import thorough


@thorough
def test_schedules_compute_the_same_on_the_stages_of_resnet(expected, weights):
    names = ["GPipe", "1F1B", "zero bubble"]
    work = (names, dict(weights), expected(2)[1], 2, SIDE)
    report = launch(measurements.compare_schedules, 2, *work, timeout=60)
    for result in report.results:
        assert list(result) == names
        assert [run.difference for run in result.values()] == [0.0] * 3  # the same bits
    for rank in (0, 1):  # GPipe keeps 2 micro-batches, 1F1B 2 - rank of them
        gpipe, one = (report.results[rank][name].saved_bytes for name in names[:2])
        assert one < gpipe * (2 - rank) / 2 * 1.05


def test_the_largest_difference_of_any_gradient_counts():
    mine = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    expected = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([3.5]), "c": mine["b"]}
    assert measurements.largest_difference(mine, expected) == 4.0


@thorough
def test_each_plan_is_timed_with_its_messages():
    """Averaging 25.6 million gradients once belongs to replicas, activations to stages."""
    small = {"samples": 2, "image_size": SIDE}
    report = launch(measurements.time_plans, 2, **small, trace=True, timeout=60)
    times = report.results[0]
    assert times._fields[-2:] == ("replicas", "stages") and min(times) > 0
    for rank in (0, 1):
        mine = [e for e in report.events if e.rank == rank]
        reduced = [e.nbytes for e in mine if e.op == "all_reduce"]
        assert reduced == 5 * [4] + 5 * [4_000_000] + [4 * 25_557_032]
        forwards = [e.note for e in mine if e.kind == "span" and e.note[0] == "F"]
        assert forwards == [f"F {rank} 0"]
