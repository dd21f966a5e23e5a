"""Collectives against their messages, one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial.shared.cost_model import links

LINK = st.builds(links.Link, st.floats(1e-7, 1e-1), st.floats(1e3, 1e12))
NBYTES = st.floats(1, 1e12)


@given(NBYTES, st.integers(1, 100), LINK)
def test_a_ring_sends_chunks_and_a_tree_everything_on_each_level(nbytes, ranks, link):
    steps = [link.latency + nbytes / ranks / link.bandwidth for _ in range(2 * (ranks - 1))]
    assert links.ring_seconds(nbytes, ranks, link) == pytest.approx(sum(steps))
    levels = 0
    while 2**levels < ranks:
        levels += 1
    expected = 2 * levels * (link.latency + nbytes / link.bandwidth)
    assert links.tree_seconds(nbytes, ranks, link) == pytest.approx(expected)


@given(NBYTES, st.integers(1, 12), st.integers(1, 8), LINK, LINK)
def test_a_hop_of_a_flat_ring_waits_for_its_own_link_alone(nbytes, nodes, per_node, a, b):
    """Each chunk makes two rounds but for two hops; all go over the slowest link at once."""
    ranks = nodes * per_node
    hops = [b if nodes > 1 and i % per_node == 0 else a for i in range(ranks)]
    around = hops[1:] if ranks > 1 else []  # one hop is saved, a slow one if there are any
    slowest = b if nodes > 1 else a
    moved = (ranks - 1) / ranks * nbytes / slowest.bandwidth
    seconds = 2 * (sum(hop.latency for hop in around) + moved)
    assert links.flat_ring_seconds(nbytes, nodes, per_node, a, b) == pytest.approx(seconds)


@given(NBYTES, st.integers(1, 100), st.integers(1, 8), LINK, LINK)
def test_a_gather_crosses_as_few_nodes_as_it_can(nbytes, ranks, per_node, fast, slow):
    """The slower counts: the links inside of a node, or its cards, one for each GPU."""
    nodes, left = 0, ranks
    while left > 0:
        nodes, left = nodes + 1, left - per_node
    width = ranks if nodes == 1 else per_node
    latency = (ranks - nodes) * fast.latency + (nodes - 1) * slow.latency
    seconds = [nbytes / width / fast.bandwidth * (width - 1)]
    if nodes > 1:
        seconds.append(nbytes / ranks * (ranks - 1) / (width * slow.bandwidth))
    one = links.all_gather_seconds(nbytes, ranks, per_node, fast, slow)
    assert one == pytest.approx(latency + max(seconds))
