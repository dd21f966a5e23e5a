"""Clusters that cannot be are refused; small and odd ones come out right."""

import pytest

from mgpu_tutorial.at_scale import figures, planner, world
from mgpu_tutorial.lab import RankFailed, launch
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS
from mgpu_tutorial.shared.cost_model.plans import model_of
from mgpu_tutorial.step_time import published
from tests.at_scale.test_world import STAGE

H100, SMALL = CLUSTERS["H100"], model_of(7e9)


@pytest.mark.parametrize("tp", [3, 16])
def test_heads_that_cannot_be_shared_are_refused(tp):
    given = world.two_steps, 1, (1, 8, tp), STAGE
    with pytest.raises(RankFailed, match=f"ValueError: .*{tp} .*8 heads"):
        launch(*given, backend="none", device="cpu", trace=True)


def test_whole_numbers_may_have_a_point():
    assert planner.rank_plans(SMALL, H100, 8.0, 8.0) == planner.rank_plans(SMALL, H100, 8, 8)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: planner.rank_plans(SMALL, H100, 0, 8), "gpus"),
        (lambda: planner.rank_plans(SMALL, H100, 8, 0), "batch"),
        (lambda: planner.rank_plans(SMALL, H100, 8, 8, 0), "context"),
        (lambda: planner.rank_plans(SMALL, H100._replace(gpus_per_node=0), 8, 8), "gpus_per"),
        (lambda: planner.rank_plans(SMALL._replace(heads=0), H100, 8, 8), "heads"),
        (lambda: planner.rank_plans("7B", H100, 8, 8), "Model"),
        (lambda: planner.rank_plans(SMALL, "H100", 8, 8), "Cluster"),
        (lambda: planner.with_network(H100, 0), "gigabytes .*0"),
        (lambda: figures.plan_map([]), "plan"),
        (lambda: published.predict("nemo"), "family .*Megatron.*'nemo'"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
