"""Clusters and averages that cannot be are refused; small and odd ones come out right."""

import pytest
import torch

from mgpu_tutorial.at_scale import averaging, failures, figures, planner, world
from mgpu_tutorial.lab import RankFailed, launch
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS
from mgpu_tutorial.shared.cost_model.plans import model_of
from mgpu_tutorial.step_time import published
from tests.at_scale.test_world import STAGE

H100, SMALL = CLUSTERS["H100"], model_of(7e9)


@pytest.mark.parametrize(
    "words, per_node, count",
    [
        ("4 ranks do not fill nodes of 3", 3, 8),
        ("4 ranks do not fill nodes of 0", 0, 8),
        ("4 ranks do not fill nodes of 8", 8, 8),
    ],
)
def test_ranks_that_do_not_fill_their_nodes_are_refused(refused, words, per_node, count):
    refused(4, words, averaging.sum_by_node, per_node, count)


def summed(rank, world_size, tensor):
    sizes = world_size // 2, 2
    mesh = averaging.init_device_mesh("cpu", sizes, mesh_dim_names=("across", "inside"))
    averaging.hierarchical(tensor, mesh)
    return tensor


@pytest.mark.parametrize(
    "words, tensor",
    [
        ("flatten it and pad it", torch.ones(7)),
        ("flatten it and pad it", torch.ones(2, 4)),
        ("flatten it and pad it", torch.tensor(1.0)),
        ("a tensor that is not contiguous", torch.ones(16)[::2]),
        ("a sum of torch.bool counts nothing", torch.ones(8, dtype=torch.bool)),
        ("a tensor that autograd records", torch.ones(8, requires_grad=True)),
    ],
)
def test_a_tensor_that_nodes_cannot_cut_is_refused(refused, words, tensor):
    refused(4, words, summed, tensor, sent=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 2, 8])
def test_any_dtype_is_summed(ranks, dtype, count):
    for found in ranks(4, summed, torch.arange(count).to(dtype)).results:
        assert found.dtype == dtype and found.tolist() == [4 * i for i in range(count)]


@pytest.mark.parametrize(
    "words, every, shape",
    [
        ("8 steps cannot end with an average, made every 0", 0, (2, 8, 4, 16)),
        ("8 steps cannot end with an average, made every 3", 3, (2, 8, 4, 16)),
        ("data for 4 ranks, and there are 2", 2, (4, 8, 4, 16)),
        ("data for 1 ranks, and there are 2", 2, (1, 8, 4, 16)),
    ],
)
def test_models_that_would_end_apart_are_refused(refused, words, every, shape):
    refused(2, words, averaging.local_sgd, every, torch.ones(shape).double())


@pytest.mark.parametrize(
    "mesh, words",
    [
        ((1, 8, 3), "TP 3 cannot share 8 heads evenly"),
        ((1, 8, 16), "TP 16 cannot share 8 heads evenly"),
        ((1, 0, 8), "is no mesh of PP, DP and TP"),
        ((8, 8), "is no mesh of PP, DP and TP"),
    ],
)
def test_a_world_that_cannot_be_is_refused(mesh, words):
    given = world.two_steps, 1, mesh, STAGE
    with pytest.raises(RankFailed, match=f"ValueError: .*{words}"):
        launch(*given, backend="none", device="cpu", trace=True)


def test_whole_numbers_may_have_a_point():
    assert planner.rank_plans(SMALL, H100, 8.0, 8.0) == planner.rank_plans(SMALL, H100, 8, 8)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: planner.rank_plans(SMALL, H100, 0, 8), "gpus must be a whole number"),
        (lambda: planner.rank_plans(SMALL, H100, 8, 0), "batch must be a whole number"),
        (lambda: planner.rank_plans(SMALL, H100, 8, 8, 0), "context must be a whole number"),
        (
            lambda: planner.rank_plans(SMALL, H100._replace(gpus_per_node=0), 8, 8),
            "gpus_per_node must be a whole number",
        ),
        (
            lambda: planner.rank_plans(SMALL._replace(heads=0), H100, 8, 8),
            "heads must be a whole number",
        ),
        (lambda: planner.rank_plans("7B", H100, 8, 8), "model must be a Model, such as"),
        (lambda: planner.rank_plans(SMALL, "H100", 8, 8), "cluster must be a Cluster"),
        (lambda: failures.lost(10**6, 600, 300), "`save` must be the shorter"),
        (lambda: planner.with_network(H100, "50"), "gigabytes must be a number, got '50'"),
        (lambda: planner.with_network(H100, 0), "a network of 0 GB/s carries nothing"),
        (lambda: planner.with_network(H100, 50e9), "no network has 5e.10 GB/s: give giga"),
        (lambda: planner.with_network(H100, -1), "a network of -1 GB/s carries nothing"),
        (lambda: failures.lost(256, 0, 300), "both times must be above 0"),
        (lambda: failures.lost(0, 9, 300), "GPUs must be a whole number"),
        (lambda: failures.lost(256, 9, -1), "a restart takes 0 seconds or more, got -1"),
        (lambda: failures.lost(256, 9, float("nan")), "a restart takes 0 seconds or more"),
        (lambda: failures.lost(100_000, 20, 3600), "100000 GPUs lose all of their time"),
        (lambda: figures.plan_map([]), "give what rank_plans returned"),
        (lambda: published.predict("nemo"), "no rows of 'nemo', but of Megatron"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
