"""The tables of the notebook show the formulas' numbers."""

import pytest

from mgpu_tutorial.at_scale import failures, figures, planner, predictions, published
from mgpu_tutorial.shared.cost_model.links import (
    Link,
    hierarchical_seconds,
    ring_seconds,
    tree_seconds,
)
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS
from mgpu_tutorial.shared.cost_model.models import model_of
from mgpu_tutorial.shared.cost_model.plans import Plan
from mgpu_tutorial.shared.cost_model.step import predict_step

H100 = CLUSTERS["H100"]
SMALL = model_of(7e9)


@pytest.fixture(scope="module")
def small():
    return planner.rank_plans(SMALL, H100, 64, 512)


def test_a_step_is_the_sum_of_its_parts(small):
    step = small[0].step
    table = figures.parts_table({"x": step, "y": small[1].step})
    assert table.header == ["% of a step", "x", "y"]
    shares = {row[0]: row[1] for row in table.rows}
    assert "context" not in shares  # takes nothing in either
    assert shares["matmul"] == f"{100 * step.parts.matmul / step.seconds:.1f}"
    assert [row[1] for row in table.rows[-3:]] == [
        f"{step.seconds:.2f}",
        f"{step.mfu:.1%}",
        f"{step.hfu:.1%}",
    ]
    assert sum(float(row[2]) for row in table.rows[:-3]) == pytest.approx(100, abs=0.5)


def test_the_selective_steps_are_those_of_table_5():
    steps = figures.selective_steps()
    assert list(steps) == ["22B", "175B", "530B", "1T"]
    rows = {row.run.name: row.step for row in predictions.predict("table 5")}
    assert all(step == rows[f"{size} selective"] for size, step in steps.items())


def test_the_picture_shows_what_was_published_and_predicted():
    marks, lines = figures.strong_scaling()
    assert marks["ZeRO 3"] == ([384, 768, 1536], [144, 88, 44])
    assert marks["TP and PP"] == ([384, 768, 1536], [153, 149, 141])
    for (gpus, theirs), (same, ours) in zip(marks.values(), lines.values(), strict=True):
        assert gpus == same and ours == pytest.approx(theirs, rel=0.06)


def test_the_tables_show_every_row():
    table = figures.prediction_table("table 5", "MPT, FSDP")
    assert len(table.rows) == 8 + 9 and table.rows[0][-1] == "fitted"
    assert table.rows[7] == ["table 5: 1T selective", "71.49", "73.35", "s", "+2.6%"]
    assert table.rows[9] == ["MPT, FSDP: 7B on 16", "3,645", "3,683", "tokens/s", "+1.0%"]
    worst = {row[0]: row[1:] for row in figures.worst_table().rows}
    assert list(worst) == list(published.FAMILIES)
    assert worst["ZeRO-3"] == [6, "-10.8%", "530B on 1120"]
    row = ["175B on 1536", 12, "96", 141, "141.2", "+0.1%"]
    assert figures.bubble_table().rows[2] == row
    rows = figures.measured_memory().rows
    assert [row[1] for row in rows] == [82.4, 67.0] and [row[3] for row in rows] == [
        "-7%",
        "-9%",
    ]


def test_the_plans_are_shown_as_they_are(small):
    rows = figures.plan_table(small).rows
    ranks = [choice.rank for choice in small]
    for (rank, plan, step), row in zip(small, rows, strict=True):
        assert row == [
            f"{rank}{'=' * (ranks.count(rank) > 1)}",
            str(plan),
            f"ZeRO {plan.zero}",
            f"{plan.micro_batch} × {plan.interleaving}",
            plan.recompute,
            f"{step.seconds:.2f}",
            f"{step.tflops:.0f}",
            f"{step.mfu:.0%}",
            f"{step.memory.total / 1e9:.0f}",
            step.bottleneck,
        ]
    assert {row[0].endswith("=") for row in rows} == {True, False}


def test_the_sliders_set_the_cluster():
    cluster = H100._replace(between=Link(5e-6, 5e9), gpus_per_node=4)
    best = planner.rank_plans(model_of(13e9, 4096), cluster, 64, 512)
    expected = figures.plan_table(best[:6]).rows
    assert figures.best_plans(13, 64, 512, 5, 4).rows == expected
    assert len(expected) == 6
    assert "no plan fits" in figures.best_plans(405, 8, 8, 50, 8).header[0]


def test_plans_are_compared_with_half_the_network():
    plans = {"a": Plan(dp=64, zero=3), "b": Plan(dp=64)}
    halved = H100._replace(between=Link(5e-6, 25e9))
    rows = figures.compare_plans(SMALL, H100, 512, plans).rows
    for (name, plan), row in zip(plans.items(), rows, strict=True):
        step = predict_step(SMALL, H100, plan, 512)
        slow = predict_step(SMALL, halved, plan, 512)
        assert row[:5] == [
            name,
            f"{step.seconds:.2f}",
            f"{slow.seconds:.2f}",
            f"{step.mfu:.0%}",
            step.bottleneck,
        ]
    assert H100.between == Link(5e-6, 50e9)
    assert "too many" in rows[1][-1] and "too" not in rows[0][-1]


def test_the_failure_tables():
    first, last = figures.failure_table(20, 300, [1024, 16_384]).rows
    assert first[:2] == ["1,024", "49.5"]
    assert last == ["16,384", "3.1", "11", "8.7%", "2.7%"]
    lines = figures.lost_by_interval(20, 300, 16_384, [5, 10])
    losses = [
        failures.lost(20, 300, failures.between_failures(16_384), 60 * m) for m in (5, 10)
    ]
    assert lines == {
        "in all": ([5, 10], [100 * loss.total for loss in losses]),
        "saving": ([5, 10], [100 * loss.saving for loss in losses]),
        "repeating": ([5, 10], [100 * loss.repeating for loss in losses]),
    }


def test_an_all_reduce_in_three_ways():
    inside, between = H100.reached()
    for size, row in zip(
        (2**10, 2**30), figures.all_reduce_table([2**10, 2**30], 1024, H100).rows, strict=True
    ):
        ring, tree, nodes = (
            1e3 * ring_seconds(size, 1024, between),
            1e3 * tree_seconds(size, 1024, between),
            1e3 * hierarchical_seconds(size, 128, 8, inside, between),
        )
        assert row[1:] == [f"{ring:,.2f}", f"{tree:,.2f}", f"{nodes:,.2f}"]
        assert tree < nodes < ring if size == 2**10 else nodes < ring < tree
