"""An all-reduce by nodes, slow links between them, and a pretended rank of a large world."""

import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial.at_scale import figures, hierarchy
from mgpu_tutorial.at_scale.pretend import pretend
from mgpu_tutorial.at_scale.world import share_out, steps_of_one_rank
from mgpu_tutorial.shared.cost_model.links import Link, hierarchical_seconds, ring_seconds
from mgpu_tutorial.shared.cost_model.models import Model

METHODS = [hierarchy.flat_ring, hierarchy.hierarchical]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world_size, per_node", [(1, 1), (4, 4), (6, 3), (6, 2), (4, 1)])
def test_every_rank_has_the_sum(ranks, method, world_size, per_node):
    results = ranks(world_size, hierarchy.sum_by, method, per_node, 36).results
    assert results == [0.0] * world_size


def test_the_error_of_a_sum_is_the_largest(ranks):
    """Without a sum rank r has i + r where 2 i + 1 belongs, so it is off by i + 1 - r."""
    results = ranks(2, hierarchy.sum_by, lambda tensor, per_node: None, 1, 36).results
    assert results == [36.0, 35.0]


@pytest.mark.parametrize(
    "method, sent",
    [
        (hierarchy.flat_ring, [0, 6 * 64 * 8 / 4, 0, 6 * 64 * 8 / 4]),
        (hierarchy.hierarchical, [2 * 64 * 8 / 4] * 4),
    ],
)
def test_a_quarter_of_the_bytes_crosses_per_card(ranks, method, sent):
    """64 numbers of 8 bytes on two nodes of two: a half each, sent and fetched in halves."""
    report = ranks(4, hierarchy.sum_by, method, 2, 64, trace=True)
    crossing = [e for e in report.events if e.sends and e.rank // 2 != e.peer // 2]
    assert [sum(e.nbytes for e in crossing if e.rank == rank) for rank in range(4)] == sent


SLOW, FAST = Link(30e-3, 50e6), Link(5e-3, 200e6)


@pytest.mark.slow
@pytest.mark.parametrize("inside, between", [(SLOW, FAST), (FAST, SLOW)])
def test_slow_links_show_in_the_times(inside, between):
    """Each rank waits at least as long as the formula says, whichever link is slow."""
    times = figures.time_hierarchy(inside, between)
    assert times["flat_ring"] >= ring_seconds(2**20, 8, SLOW)
    assert times["hierarchical"] >= hierarchical_seconds(2**20, 2, 4, inside, between)


def by_messages(rank, world_size):
    """Two messages between the nodes of ranks 0 and 2, and one inside; then in groups."""
    number = torch.tensor([7.0])
    for source, target in ((0, 2), (0, 1), (1, 3)):
        if rank == source:
            dist.isend(number, target).wait()
        if rank == target:
            dist.irecv(number, source).wait()
    for members in ([0, 2], [0, 1], [0, 1, 2, 3]):
        group = dist.new_group(members)
        if rank in members:
            dist.broadcast(number, members[0], group=group)
    return number.item()


def test_messages_between_nodes_are_counted():
    """Two messages; one of a broadcast over both nodes, and two of one to all four ranks."""
    assert figures.crossings(by_messages, 2) == [[7.0] * 4, 2 + 1 + 2]
    assert figures.crossings(lambda rank, world_size: ..., 2) is ...


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
