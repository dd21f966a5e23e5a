"""The arithmetic of memory, and what the ranks really hold."""

import pytest

from mgpu_tutorial.lab import launch
from mgpu_tutorial.sharding import arithmetic, measurements, training
from tests.sharding import ranks


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, [14e9, 14e9, 84e9]),
        (1, [14e9, 14e9, 10.5e9]),
        (2, [14e9, 1.75e9, 10.5e9]),
        (3, [1.75e9, 1.75e9, 10.5e9]),
    ],
)
def test_seven_billion_on_eight_ranks(stage, expected):
    assert arithmetic.held(7e9, 8, stage) == expected


def test_both_recipes_are_sixteen_bytes():
    assert sum(arithmetic.FLOAT32) == sum(arithmetic.MIXED) == 16


def test_the_ledger_counts_the_same_on_two_ranks():
    workers = {
        stage: (measurements.count_state, prepare)
        for stage, prepare in training.STAGES.items()
    }
    for found in launch(ranks.run_all, 2, workers).results:
        for stage, counted in found.items():
            assert counted == arithmetic.held(29_312, 2, stage, arithmetic.FLOAT32)


def test_a_step_sends_the_model_two_or_three_times():
    report = launch(measurements.trace_step, 2, training.zero_3, trace=True)
    expected = {"all_gather_single": 2.0, "reduce_scatter_single": 1.0, "in all": 3.0}
    assert measurements.models_sent(report) == expected
