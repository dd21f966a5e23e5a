"""Messages and collectives against arithmetic by hand."""

import pytest

from mgpu_tutorial.shared import cost_model as cost

FAST, SLOW = cost.Link(1e-3, 1e9), cost.Link(1e-2, 1e8)


def test_a_message_takes_latency_and_bytes():
    assert cost.message_seconds(2e8, SLOW) == pytest.approx(2.01)


def test_a_ring_by_hand():
    """Four ranks: six steps of a quarter of 4 MB."""
    assert cost.ring_seconds(4e6, 4, FAST) == pytest.approx(6 * (1e-3 + 1e6 / 1e9))
    assert cost.ring_seconds(4e6, 1, FAST) == 0


def test_a_tree_by_hand():
    """Five ranks make three levels, up and down, each with the whole."""
    assert cost.tree_seconds(4e6, 5, FAST) == pytest.approx(6 * (1e-3 + 4e-3))


def test_a_hierarchy_by_hand():
    """Two nodes of four: six quick steps of a quarter, two slow ones of an eighth."""
    found = cost.hierarchical_seconds(8e6, 2, 4, FAST, SLOW)
    assert found == pytest.approx(6 * (1e-3 + 2e-3) + 2 * (1e-2 + 1e6 / 1e8))


def test_a_gather_inside_a_node_by_hand():
    found = cost.all_gather_seconds(8e6, 4, 8, FAST, SLOW)
    assert found == pytest.approx(3e-3 + 6e6 / 1e9)
    assert cost.all_gather_seconds(8e6, 1, 8, FAST, SLOW) == 0
    assert cost.all_reduce_seconds(8e6, 4, 8, FAST, SLOW) == pytest.approx(2 * found)


def test_a_gather_between_nodes_uses_all_cards_of_a_node():
    """Sixteen ranks on two nodes: 15/16 of 16 MB over eight cards; the slower side counts."""
    latency = 14 * 1e-3 + 1 * 1e-2
    found = cost.all_gather_seconds(16e6, 16, 8, FAST, SLOW)
    assert found == pytest.approx(latency + max(14e6 / 1e9, 15e6 / 8e8))
    alone = cost.all_gather_seconds(16e6, 16, 1, FAST, SLOW)
    assert alone == pytest.approx(15 * 1e-2 + 15e6 / 1e8)
