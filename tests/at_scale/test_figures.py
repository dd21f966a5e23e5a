"""What is drawn, and what the sliders set; the tables stand in the notebook."""

import pytest

from mgpu_tutorial.at_scale import figures, planner
from mgpu_tutorial.shared.cost_model.links import Link
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS
from mgpu_tutorial.shared.cost_model.models import model_of

H100 = CLUSTERS["H100"]


def test_the_picture_shows_what_was_published_and_predicted():
    marks, lines = figures.strong_scaling()
    assert marks["ZeRO 3"] == ([384, 768, 1536], [144, 88, 44])
    assert marks["TP and PP"] == ([384, 768, 1536], [153, 149, 141])
    for (gpus, theirs), (same, ours) in zip(marks.values(), lines.values(), strict=True):
        assert gpus == same and ours == pytest.approx(theirs, rel=0.06)


def test_the_sliders_set_the_cluster():
    cluster = H100._replace(between=Link(5e-6, 5e9), gpus_per_node=4)
    best = planner.rank_plans(model_of(13e9, 4096), cluster, 64, 512)
    expected = figures.plan_table(best[:6]).rows
    assert figures.best_plans(13, 64, 512, 5, 4).rows == expected
    assert len(expected) == 6
    assert "no plan fits" in figures.best_plans(405, 8, 8, 50, 8).header[0]


def test_what_is_lost_by_interval():
    """54 days over 419 lie between two failures of 16,384 GPUs."""
    lines = figures.lost_by_interval(20, 300, 16_384, [5, 10])
    saving, repeating = (
        [100 * 20 / (60 * m) for m in (5, 10)],
        [100 * 30 * m / (54 * 86_400 / 419) for m in (5, 10)],
    )
    restarting = 100 * 300 / (54 * 86_400 / 419)
    assert lines["saving"] == ([5, 10], pytest.approx(saving))
    assert lines["repeating"] == ([5, 10], pytest.approx(repeating))
    in_all = [s + r + restarting for s, r in zip(saving, repeating, strict=True)]
    assert lines["in all"] == ([5, 10], pytest.approx(in_all))
