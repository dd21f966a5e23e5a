"""Messages, collectives and checkpoints against arithmetic by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial.shared.cost_model import links
from mgpu_tutorial.shared.cost_model.failures import best_interval
from mgpu_tutorial.shared.cost_model.links import Link

LINK = st.builds(Link, st.floats(1e-7, 1e-1), st.floats(1e3, 1e12))
NBYTES = st.floats(1, 1e12)


def test_a_message_takes_latency_and_bytes():
    assert links.message_seconds(2e8, Link(1e-2, 1e8)) == pytest.approx(2.01)


@given(NBYTES, st.integers(1, 100), LINK)
def test_a_ring_sends_a_chunk_to_each_other_rank_twice(nbytes, ranks, link):
    steps = [link.latency + nbytes / ranks / link.bandwidth for _ in range(2 * (ranks - 1))]
    assert links.ring_seconds(nbytes, ranks, link) == pytest.approx(sum(steps))


@given(NBYTES, st.integers(1, 100), LINK)
def test_a_tree_sends_everything_up_and_down_each_level(nbytes, ranks, link):
    levels = 0
    while 2**levels < ranks:
        levels += 1
    expected = 2 * levels * (link.latency + nbytes / link.bandwidth)
    assert links.tree_seconds(nbytes, ranks, link) == pytest.approx(expected)


@given(NBYTES, st.integers(1, 8), st.integers(1, 8), LINK, LINK)
def test_a_hierarchy_sends_a_part_between_the_nodes(nbytes, nodes, per_node, fast, slow):
    inside = 2 * (per_node - 1) * (fast.latency + nbytes / per_node / fast.bandwidth)
    part = nbytes / per_node / nodes
    between = 2 * (nodes - 1) * (slow.latency + part / slow.bandwidth)
    found = links.hierarchical_seconds(nbytes, nodes, per_node, fast, slow)
    assert found == pytest.approx(inside + between)


@given(NBYTES, st.integers(1, 100), st.integers(1, 8), LINK, LINK)
def test_a_gather_crosses_as_few_nodes_as_it_can(nbytes, ranks, per_node, fast, slow):
    """The slower counts: the links inside of a node, or its cards, one for each GPU."""
    found = links.all_gather_seconds(nbytes, ranks, per_node, fast, slow)
    nodes, left = 0, ranks
    while left > 0:
        nodes, left = nodes + 1, left - per_node
    width = ranks if nodes == 1 else per_node
    latency = (ranks - nodes) * fast.latency + (nodes - 1) * slow.latency
    seconds = [nbytes / width / fast.bandwidth * (width - 1)]
    if nodes > 1:
        seconds.append(nbytes / ranks * (ranks - 1) / (width * slow.bandwidth))
    assert found == pytest.approx(latency + max(seconds))
    both_halves = links.all_reduce_seconds(nbytes, ranks, per_node, fast, slow)
    assert both_halves == pytest.approx(2 * found)


@given(st.floats(1e-2, 1e3), st.floats(1e-1, 1e6), st.sampled_from([0.5, 0.9, 1.1, 2]))
def test_the_best_interval_loses_least(save, failure, factor):
    def lost(interval):
        return save / interval + interval / 2 / failure

    best = best_interval(save, failure)
    assert lost(best) < lost(factor * best)
    assert best_interval(4.0, 8.0) == 8.0
