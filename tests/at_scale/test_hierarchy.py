"""An all-reduce by nodes, and a pretended rank of a large world."""

import pytest

from mgpu_tutorial.at_scale import hierarchy
from mgpu_tutorial.at_scale.pretend import pretend
from mgpu_tutorial.at_scale.world import share_out, steps_of_one_rank
from mgpu_tutorial.shared.cost_model.models import Model


@pytest.mark.parametrize("world_size, per_node", [(4, 4), (6, 2), (4, 1)])
def test_every_rank_has_the_sum(ranks, world_size, per_node):
    results = ranks(world_size, hierarchy.sum_by_node, per_node, 36).results
    assert results == [0.0] * world_size


def test_a_part_of_the_bytes_crosses_per_card(ranks):
    """64 numbers of 8 bytes on two nodes of two: each rank adds up a half with one other."""
    report = ranks(4, hierarchy.sum_by_node, 2, 64, trace=True)
    calls = [(e.rank, e.nbytes, list(e.group)) for e in report.events if e.op == "all_reduce"]
    halves = [(0, 256, [0, 2]), (1, 256, [1, 3]), (2, 256, [0, 2]), (3, 256, [1, 3])]
    assert sorted(calls) == halves


@pytest.mark.slow
def test_a_rank_calls_and_computes_what_the_cost_model_counts():
    """Two blocks: four all-reduces each, gathered twice, the rest once; scattered once.

    An eighth of the matrices and the whole head; PyTorch counts no attention here.
    """
    first, both = (
        pretend(steps_of_one_rank, share_out, (16, 16, 8), n, world_size=2048) for n in (1, 2)
    )
    calls = {name: both.calls[name] - first.calls[name] for name in both.calls}
    assert calls == {"all_reduce": 8, "all_gather": 5, "reduce_scatter": 3, "broadcast": 0}
    # of 64 tokens of width 1,024 in float32
    assert both.nbytes["all_reduce"] - first.nbytes["all_reduce"] == 8 * 64 * 1024 * 4
    model = Model(2, 1024, 8, sequence=64, vocabulary=512)
    matrices = 3 * 2 * model.layer_flops() / 8 + 3 * model.head_flops()
    assert both.flops - first.flops == 64 * matrices
    whole, kept = first.returned.values()
    assert kept == pytest.approx(whole / 128, rel=0.2) and kept > whole / 128
