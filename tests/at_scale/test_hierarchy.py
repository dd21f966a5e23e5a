"""An all-reduce by nodes, and the pretended rank of a large world."""

from functools import cache, partial
from itertools import product

import pytest

from mgpu_tutorial.at_scale import hierarchy, measurements
from mgpu_tutorial.at_scale.world import steps_of_one_rank
from mgpu_tutorial.lab import launch, pretend
from mgpu_tutorial.shared.cost_model.links import Link, hierarchical_seconds, ring_seconds
from mgpu_tutorial.shared.cost_model.models import Model
from tests.together import together

METHODS = [hierarchy.flat_ring, hierarchy.hierarchical]


@cache
def summed(ranks, *nodes):
    """What the ranks return by each method, with each size of a node, in one launch."""
    cases = list(product(METHODS, nodes))
    calls = [partial(hierarchy.sum_by, method=m, per_node=n, count=36) for m, n in cases]
    return dict(zip(cases, together(ranks, *calls), strict=True))


@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (4, 2), (4, 4), (6, 3), (4, 1)])
@pytest.mark.parametrize("method", METHODS)
def test_every_rank_has_the_sum(method, ranks, per_node):
    nodes = {1: [1], 4: [1, 2, 4], 6: [3]}[ranks]
    assert summed(ranks, *nodes)[method, per_node] == [0.0] * ranks


def crossing(rank, world_size, method, per_node, count):
    """The bytes that this rank received from another node."""
    from mgpu_tutorial.at_scale import slow_pairs

    seen = []

    def seconds(source, target, nbytes):
        seen.append(nbytes * (source // per_node != target // per_node))
        return 0.0

    with slow_pairs.slow_pairs(seconds):
        hierarchy.sum_by(rank, world_size, method, per_node, count)
    return sum(seen)


def test_a_quarter_of_the_bytes_crosses_per_card():
    """64 numbers of 8 bytes on two nodes of two: a half each, sent and fetched in halves."""
    calls = [partial(crossing, method=m, per_node=2, count=64) for m in METHODS]
    flat, nodes = together(4, *calls)
    whole = 64 * 8
    assert flat == [6 * whole / 4, 0, 6 * whole / 4, 0]
    assert nodes == [2 * whole / 4] * 4


def test_slow_links_show_in_the_times():
    """Waiting takes at least what the formula says, and the hierarchy waits less."""
    inside, between = Link(1e-3, 200e6), Link(10e-3, 20e6)
    found = measurements.time_hierarchy(inside, between)
    size = 2**20
    assert found["flat_ring"] >= ring_seconds(size, 8, between)
    least = hierarchical_seconds(size, 2, 4, inside, between)
    assert least <= found["hierarchical"] < found["flat_ring"]


def test_recv_is_put_back():
    def after(rank, world_size):
        import torch.distributed as dist

        from mgpu_tutorial.at_scale.slow_pairs import slow_pairs

        before = dist.recv
        with slow_pairs(lambda source, target, nbytes: 0.0):
            inside = dist.recv is not before
        return inside and dist.recv is before

    assert launch(after, 1).results == [True]


def test_messages_between_nodes_are_counted():
    def once(rank, world_size):
        import torch
        import torch.distributed as dist

        number = torch.tensor([7.0 * (rank == 0)])
        if rank == 0:
            dist.send(number, 2)
        elif rank == 2:
            dist.recv(number, 0)
        return number.item()

    assert measurements.crossings(once, 2) == [[7.0, 0.0, 7.0, 0.0], 1]
    assert measurements.crossings(lambda rank, world_size: ..., 2) is ...


MESH = (16, 16, 8)


@pytest.fixture(scope="module")
def counted():
    return [pretend(steps_of_one_rank, MESH, steps, world_size=2048) for steps in (1, 2)]


def test_a_rank_calls_what_the_cost_model_counts(counted):
    """Two blocks: four all-reduces each, gathered twice, the rest once; scattered once."""
    first, both = counted
    calls = {name: both.calls[name] - first.calls[name] for name in both.calls}
    assert calls == {"all_reduce": 8, "all_gather": 5, "reduce_scatter": 3, "broadcast": 0}
    # of 64 tokens of width 1,024 in float32
    assert both.nbytes["all_reduce"] - first.nbytes["all_reduce"] == 8 * 64 * 1024 * 4


def test_a_rank_computes_what_the_cost_model_counts(counted):
    """An eighth of the matrices and the whole head; PyTorch counts no attention here."""
    first, both = counted
    model = Model(2, 1024, 8, sequence=64, vocabulary=512)
    matrices = 3 * 2 * model.layer_flops() / 8 + 3 * model.head_flops()
    assert both.flops - first.flops == 64 * matrices


def test_a_rank_keeps_its_share(counted):
    whole, mine = counted[0].returned.values()
    assert mine == pytest.approx(whole / 128, rel=0.2) and mine > whole / 128


def test_the_table_of_worlds(counted, monkeypatch):
    """A column per mesh, of what a second step adds to a first."""
    worlds = []

    def recorded(worker, mesh, steps, world_size):
        worlds.append(world_size)
        return counted[steps - 1]

    monkeypatch.setattr(measurements, "pretend", recorded)
    table = measurements.second_step((1, 8, 8), (16, 128, 8))
    assert table.header == ["a step of one rank", "64 ranks", "16,384 ranks"]
    assert worlds == [64, 64, 16_384, 16_384]
    assert [row[0] for row in table.rows[-2:]] == ["operations", "parameters kept"]
    assert table.rows[2][1:] == ["8 calls, 2 MiB"] * 2
    assert table.rows[3][1:] == ["1,409.3 million"] * 2
