"""The cost model against arithmetic by hand."""

import itertools

import pytest

from mgpu_tutorial.shared import cost_model as cost

NET = cost.NetworkCost(
    seconds=0.01, overhead=0.02, parameters=1e6, activation_bytes=1e6, cut_bytes=1e5
)
LINK = cost.Link(latency=1e-3, bandwidth=1e9)


def test_a_step_by_hand():
    assert cost.step_seconds(NET, LINK, 8, cost.Plan()) == pytest.approx(0.10)
    slot = (0.02 + 0.01 * 2) / 2 + 2 * (1e-3 + 2e5 / 1e9)
    assert cost.step_seconds(NET, LINK, 8, cost.Plan(1, 2, 4)) == pytest.approx(5 * slot)
    reduce = 2 * 1e-3 + 4e6 / 1e9
    assert cost.step_seconds(NET, LINK, 8, cost.Plan(2)) == pytest.approx(0.06 + reduce)


def test_replicas_of_stages_by_hand():
    """4 copies of 2 stages with 2 micro-batches: 3 slots of one sample, half a ring."""
    slot = (0.02 + 0.01 * 1) / 2 + 2 * (1e-3 + 1e5 / 1e9)
    ring = 6 * 1e-3 + 6 / 4 * 2e6 / 1e9
    found = cost.step_seconds(NET, LINK, 8, cost.Plan(4, 2, 2))
    assert found == pytest.approx(3 * slot + ring)


def test_memory_by_hand():
    """Half the parameters at 16 bytes each, and two micro-batches."""
    assert cost.memory(NET, 8, cost.Plan(1, 2, 4)) == pytest.approx(8e6 + 2 * 2e6 / 2)
    assert cost.memory(NET, 8, cost.Plan()) == pytest.approx(16e6 + 8e6)
    assert cost.memory(NET, 8, cost.Plan(2, 4, 2)) == pytest.approx(4e6 + 2 * 2e6 / 4)


def test_a_fit_finds_the_network_that_made_the_times():
    """T(m) = (m + 1) / 2 (a + 32 c / m); only the ends and the fastest repetition count."""
    made = {m: [(m + 1) / 2 * (0.02 + 0.01 * 32 / m), 9.0] for m in (1, 32)}
    found = cost.fit({**made, 4: [7.0]}, 32, stages=2)
    assert (found.seconds, found.overhead) == (pytest.approx(0.01), pytest.approx(0.02))


def test_calibration_takes_four_times():
    times = cost.Times(
        small_all_reduce=0.002,
        large_all_reduce=0.006,
        one_sample=0.03,
        one_rank=0.1,
        replicas=9.0,
        stages=9.0,
    )
    net, link = cost.calibrate(times, 8, 10, 20.0)
    assert (net.seconds, net.overhead) == (pytest.approx(0.01), pytest.approx(0.02))
    assert (net.parameters, net.cut_bytes, net.activation_bytes) == (10, 20.0, 0)
    assert link == (pytest.approx(0.001), pytest.approx(1e9))


def test_the_best_plan_is_the_fastest_that_fits():
    fast, slow = cost.Link(1e-6, 1e12), cost.Link(1e-6, 1e6)
    assert cost.best_plan(NET, fast, 64, 8, 1e9)[0] == cost.Plan(8, 1, 1)
    assert cost.best_plan(NET, slow, 64, 8, 1e9)[0] == cost.Plan(1, 1, 1)
    plan, seconds = cost.best_plan(NET, fast, 64, 8, 6e6)
    powers = [1, 2, 4, 8, 16, 32, 64]
    fitting = [
        cost.step_seconds(NET, fast, 64, cost.Plan(replicas, stages, micro))
        for replicas, stages, micro in itertools.product(powers, repeat=3)
        if replicas * stages <= 8 and replicas * micro <= 64
        and 16e6 / stages + 1e6 * 64 / (replicas * micro) * min(micro, stages) / stages <= 6e6
    ]  # fmt: skip
    assert plan.stages > 1 and seconds == min(fitting)
    assert cost.best_plan(NET, fast, 64, 8, 1e5) is None


def test_a_transformer_by_hand():
    """One layer of width 4 and 10 tokens: 12 · 16 parameters, 6 operations each and token."""
    found = cost.transformer(layers=1, width=4, speed=100.0, tokens=10)
    assert found.parameters == 192 and found.seconds == pytest.approx(115.2)
    assert (found.activation_bytes, found.cut_bytes) == (34 * 40, 80)


def test_plans_are_written_as_people_say_them():
    assert str(cost.Plan()) == "one device" and str(cost.Plan(4)) == "4 replicas"
    assert str(cost.Plan(2, 4, 8)) == "2 replicas of 4 stages, m = 8"
    table = cost.plan_table({"net": NET}, {"slow": LINK}, 64, 8, 1e5)
    assert table.rows == [["net", "does not fit"]]
    links = {"fast": cost.Link(1e-6, 1e12), "slow": cost.Link(1e-6, 1e6)}
    table = cost.plan_table({"net": NET}, links, 64, 8, 1e9)
    assert table.header == ["", "fast", "slow"]
    assert table.rows == [["net", "8 replicas", "one device"]]
