"""What is saved by four ranks is read by two, and Young's interval is the best one."""

import os

import pytest

from mgpu_tutorial.lab import launch
from mgpu_tutorial.when_it_breaks import interval, sharded


def test_four_ranks_write_what_any_number_of_ranks_reads(tmp_path):
    saved = launch(sharded.save_rows, 4, str(tmp_path)).results
    assert saved == [[0.0, 3.0], [6.0, 9.0], [12.0, 15.0], [18.0, 21.0]]
    assert len([name for name in os.listdir(tmp_path) if name.endswith(".distcp")]) == 4
    assert launch(sharded.load_rows, 2, str(tmp_path)).results == [
        [0.0, 3.0, 6.0, 9.0],
        [12.0, 15.0, 18.0, 21.0],
    ]


def test_the_interval_is_that_of_the_formula():
    assert interval.best_interval(1.0, 185.58) == pytest.approx(19.27, abs=0.01)
    assert interval.best_interval(4.0, 8.0) == 8.0


@pytest.mark.parametrize("seed", [0, 1])
def test_the_simulated_waste_is_least_near_the_interval_of_the_formula(seed):
    best = interval.best_interval(1.0, 185.58)
    factors = [0.25, 0.5, 1.0, 2.0, 4.0]
    waste = [interval.simulate_waste(f * best, 1.0, 185.58, seed=seed) for f in factors]
    assert min(waste) == waste[2]
    assert waste[2] == pytest.approx(1 / best + best / (2 * 185.58), rel=0.1)


def test_without_failures_only_the_saves_cost_time():
    assert interval.simulate_waste(10.0, 1.0, 1e12, work=1e4) == pytest.approx(0.1)


def test_what_a_failure_costs_is_the_work_since_the_last_save(monkeypatch):
    gaps = iter([25.0, 24.0])
    monkeypatch.setattr(interval.random.Random, "expovariate", lambda *_: next(gaps))
    # saves at 11 and 22; the failure at 25 throws away 3; saves at 36 and 47, failure at 49
    assert interval.simulate_waste(10.0, 1.0, 99.0, work=40.0) == pytest.approx(49 / 40 - 1)
