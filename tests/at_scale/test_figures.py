"""What the sliders set; the tables stand in the notebook."""

from mgpu_tutorial.at_scale import figures, planner
from mgpu_tutorial.shared.cost_model.links import Link
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS
from mgpu_tutorial.shared.cost_model.models import model_of


def test_the_sliders_set_the_cluster():
    cluster = CLUSTERS["H100"]._replace(between=Link(5e-6, 5e9), gpus_per_node=4)
    best = planner.rank_plans(model_of(13e9, 4096), cluster, 64, 512)
    expected = figures.plan_table(best[:6]).rows
    assert figures.best_plans(13, 64, 512, 5, 4).rows == expected
    assert len(expected) == 6
    assert "no plan fits" in figures.best_plans(405, 8, 8, 50, 8).header[0]
