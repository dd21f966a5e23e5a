"""What no model, plan, link or run can be is refused, with the name of its field."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial.shared.cost_model import links
from mgpu_tutorial.shared.cost_model.links import Link
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS
from mgpu_tutorial.shared.cost_model.plans import (
    SIZES,
    WIDTHS,
    Model,
    Plan,
    memory_of,
    model_of,
)
from mgpu_tutorial.shared.cost_model.step import predict_step

MODEL = Model(12, 768, 12, experts=4, active=2)
H100, ALONE, LINK = CLUSTERS["H100"], Plan(), Link(1e-6, 1e9)


def predicted(model=MODEL, plan=ALONE, batch=8):
    return predict_step(model, H100, plan, batch)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, math.nan])
@pytest.mark.parametrize("name", SIZES)
def test_each_size_of_a_plan_is_a_whole_number(name, wrong):
    with pytest.raises(ValueError, match=f"^{name} must be a whole number, 1 or more, got"):
        predicted(plan=ALONE._replace(**{name: wrong}))


@pytest.mark.parametrize("wrong", [0, -1, 1.5])
@pytest.mark.parametrize("name", WIDTHS)
def test_each_width_of_a_model_is_a_whole_number(name, wrong):
    with pytest.raises(ValueError, match=f"^{name} must be a whole number, 1 or more, got"):
        predicted(MODEL._replace(**{name: wrong}))


@pytest.mark.parametrize(
    "model, plan, batch, words",
    [
        ({}, {"zero": 7}, 8, "zero must be a stage from 0 to 3, got 7"),
        ({}, {"zero": -1}, 8, "zero must be a stage from 0 to 3, got -1"),
        ({}, {"interleaving": 4}, 8, "interleaving = 4 needs a pipeline, and pp is 1"),
        ({}, {"cp": 3}, 8, "2048 tokens do not divide into 6 equal parts, two for each"),
        ({"sequence": 6}, {"cp": 2}, 8, "6 tokens do not divide into 4 equal parts"),
        ({}, {"pp": 5}, 8, "12 layers make no 5 equal stages, with embedding and head or"),
        ({"layers": 4}, {"pp": 6}, 8, "4 layers do not make 6 stages"),
        ({}, {"pp": 3, "interleaving": 2}, 8, "in rounds of pp = 3, and a batch of 8"),
        ({}, {"dp": 8}, 12, "micro_batch is 8, and 4 sequences would be left"),
        ({}, {"dp": 2, "micro_batch": 2}, 6, "a batch of 6 does not divide"),
        ({}, {}, 0, "batch must be a whole number, 1 or more, got 0"),
        ({}, {}, -8, "batch must be a whole number, 1 or more, got -8"),
        ({}, {}, "64", "batch must be a whole number, 1 or more, got '64'"),
        ({}, {"dp": 16}, 8, "a batch of 8 is too small"),
        ({"heads": 7}, {}, 8, "width 768, 7 heads and 0 of keys: each number must divide"),
        ({"kv_heads": 5}, {}, 8, "12 heads and 5 of keys"),
        ({"kv_heads": -1}, {}, 8, "kv_heads must be a whole number, 0 or more"),
        ({"ffn": -1}, {}, 8, "ffn must be a whole number, 0 or more"),
        ({"tied": "no"}, {}, 8, "tied must be True or False, got 'no'"),
        ({}, {"overlap": "no"}, 8, "overlap must be True or False, got 'no'"),
        ({}, {"sequence_parallel": 2}, 8, "sequence_parallel must be True or False, got 2"),
        ({}, {"zero": True}, 8, "zero must be a stage from 0 to 3, got True"),
        ({"active": 5}, {}, 8, "cannot use 5 of 4 experts"),
    ],
)
def test_what_cannot_be_run_is_refused(model, plan, batch, words):
    predicted()
    with pytest.raises(ValueError, match=words):
        predicted(MODEL._replace(**model), Plan(**plan), batch)


@pytest.mark.parametrize(
    "given, words",
    [
        (("7B", H100, ALONE, 8), "model must be a Model, such as model_of.*, got '7B'"),
        ((None, H100, ALONE, 8), "model must be a Model"),
        ((MODEL, "H100", ALONE, 8), "cluster must be a Cluster: CLUSTERS has A100, A"),
        ((MODEL, H100.gpu, ALONE, 8), "cluster must be a Cluster"),
        ((MODEL, H100, "TP 8", 8), "plan must be a Plan, such as .*, got 'TP 8'"),
        ((MODEL, H100, (8, 1, 2), 8), "plan must be a Plan, such as .*, got \\(8, 1, 2\\)"),
        ((MODEL, H100, 8, ALONE), "plan must be a Plan, such as .*, got 8"),
    ],
)
def test_words_and_numbers_for_models_clusters_and_plans_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        predict_step(*given)


@pytest.mark.parametrize("wrong", ["7B", None, math.inf, math.nan, 4e7, True, MODEL])
def test_parameters_are_a_number(wrong):
    with pytest.raises(ValueError, match="^parameters must be a number of 50 million"):
        model_of(wrong)


def test_a_step_tells_whether_it_fits():
    """7 billion parameters take 18 bytes each, and an H100 has 80 GB: sixteen hold them."""
    model, full = model_of(7e9), Plan(recompute="full")
    assert not predict_step(model, H100, full, 16).fits
    assert predict_step(model, H100, full._replace(dp=16, zero=3), 16).fits


@pytest.mark.parametrize(
    "gpu, cluster, words",
    [
        ({"matmul_efficiency": -0.5}, {}, "matmul_efficiency must be above 0, got -0.5"),
        ({"matmul_efficiency": 0.0}, {}, "matmul_efficiency must be above 0, got 0.0"),
        ({"matmul_efficiency": math.nan}, {}, "matmul_efficiency must be above 0, got nan"),
        ({"matmul_efficiency": 66.4}, {}, "is a share of the peak, up to 1, got 66.4"),
        ({"peak": "989e12"}, {}, "peak must be above 0"),
        ({}, {"inside": 900}, "a link must be a Link\\(latency, bandwidth\\), got 900"),
        ({"peak": -1.0}, {}, "peak must be above 0"),
        ({"memory": 0.0}, {}, "memory must be above 0"),
        ({"memory_bandwidth": 0.0}, {}, "memory_bandwidth must be above 0"),
        ({"activation_passes": -1.0}, {}, "activation_passes must be 0 or more, got -1.0"),
        ({}, {"fixed": -0.1}, "fixed must be 0 or more, got -0.1"),
        ({}, {"gpus_per_node": 0}, "gpus_per_node must be a whole number, 1 or more"),
        ({}, {"inside": Link(0.0, 0.0)}, "bandwidth must be above 0"),
        ({}, {"between": Link(-1.0, 1.0)}, "bandwidth must be above 0, latency 0 or more"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(gpu, cluster, words):
    changed = H100._replace(gpu=H100.gpu._replace(**gpu))._replace(**cluster)
    with pytest.raises(ValueError, match=words):
        predict_step(MODEL, changed, ALONE, 8)


COLLECTIVES = [
    lambda nbytes, ranks, link: links.ring_seconds(nbytes, ranks, link),
    lambda nbytes, ranks, link: links.tree_seconds(nbytes, ranks, link),
    lambda nbytes, ranks, link: links.flat_ring_seconds(nbytes, ranks, 8, LINK, link),
    lambda nbytes, ranks, link: links.hierarchical_seconds(nbytes, ranks, 8, LINK, link),
    lambda nbytes, ranks, link: links.all_gather_seconds(nbytes, ranks, 8, LINK, link),
    lambda nbytes, ranks, link: links.all_to_all_seconds(nbytes, ranks, 8, link, LINK),
]


@pytest.mark.parametrize(
    "nbytes, ranks, link, words",
    [
        (-1, 8, LINK, "nbytes must be 0 or more, got -1"),
        ("1e9", 8, LINK, "nbytes must be 0 or more, got '1e9'"),
        (1, "8", LINK, "ranks must be a whole number, 1 or more, got '8'"),
        (1, True, LINK, "ranks must be a whole number, 1 or more, got True"),
        (1, 0, LINK, "ranks must be a whole number, 1 or more, got 0"),
        (1, 2.5, LINK, "ranks must be a whole number"),
        (1, 8, Link(1e-6, 0), "bandwidth must be above 0"),
        (1, 8, Link(-1e-6, 1e9), "latency 0 or more"),
    ],
)
@pytest.mark.parametrize("seconds", COLLECTIVES)
def test_a_message_that_cannot_be_is_refused(seconds, nbytes, ranks, link, words):
    with pytest.raises(ValueError, match=words):
        seconds(nbytes, ranks, link)


@given(st.floats(0, 1e12), st.integers(1, 3000))
def test_no_collective_takes_less_than_no_time(nbytes, ranks):
    for seconds in COLLECTIVES:
        found = seconds(nbytes, ranks, LINK)
        assert found >= 0 and math.isfinite(found)


def test_the_memory_of_a_plan_that_cannot_be_run_is_not_told():
    with pytest.raises(ValueError, match="recompute must be one of"):
        memory_of(MODEL, Plan(recompute="ful"), 8)
    with pytest.raises(ValueError, match="tp = 7 does not divide 12 heads"):
        memory_of(MODEL, Plan(tp=7), 8)


def test_a_model_has_about_so_many_parameters_or_is_refused():
    with pytest.raises(ValueError, match="a vocabulary of 1000000 makes 1.05e"):
        model_of(1e8, vocabulary=1_000_000)
    with pytest.raises(ValueError, match="^vocabulary must be a whole number, 1 or more"):
        model_of(1e8, vocabulary=-5)


def test_a_count_refuses_what_no_model_has():
    """Who counts without a plan is told too."""
    with pytest.raises(ValueError, match="12 heads cannot share 24 of keys and values"):
        _ = MODEL._replace(kv_heads=24).parameters
    with pytest.raises(ValueError, match="a token cannot use 5 of 4 experts"):
        MODEL._replace(active=5).flops_per_token()
