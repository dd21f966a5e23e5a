"""The picture of ring and tree crosses where the two really cost the same."""

import re

import pytest

from mgpu_tutorial.collectives.figures import by_size
from mgpu_tutorial.shared.cost_model.links import Link, ring_seconds, tree_seconds

WAYS = {
    "ring": lambda size, ranks, latency: ring_seconds(size, ranks, Link(latency, 25e9)),
    "tree": lambda size, ranks, latency: tree_seconds(size, ranks, Link(latency, 25e9)),
}
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


@pytest.mark.parametrize("ranks", [8, 512, 4096])
@pytest.mark.parametrize("latency", [2e-6, 50e-6])
def test_the_dot_is_where_ring_and_tree_cost_the_same(ranks, latency):
    says = by_size(WAYS, ranks, latency).text
    number, unit = re.search(r"tree up to ([\d.]+) (.B), then ring", says).groups()
    size = float(number) * UNITS[unit]
    ring, tree = (way(size, ranks, latency) for way in WAYS.values())
    assert ring == pytest.approx(tree, rel=0.05)  # two digits
    ring, tree = (1e3 * way(1e7, ranks, latency) for way in WAYS.values())
    assert f"10 MB take {ring:.3g} ms by ring, {tree:.3g} ms by tree." in says


def test_one_way_is_the_fastest_everywhere():
    assert "the fastest is ring. 10 MB" in by_size({"ring": WAYS["ring"]}, 8, 1e-5).text
