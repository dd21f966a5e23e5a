"""Messages and collectives by latency and bandwidth, as the chapter on collectives found.

`per_node` GPUs are on each node. Between nodes each of them sends its part of a tensor over a
network card of its own. Links `inside` of nodes and `between` them work at once.
"""

from numbers import Real
from typing import NamedTuple

from mgpu_tutorial.shared.guards import whole


class Link(NamedTuple):
    """A message of n bytes takes `latency` (s) + n / `bandwidth` (bytes per s, one way)."""

    latency: float
    bandwidth: float


def require_message(nbytes: float, ranks: int, *links: Link) -> None:
    """ValueError for less than no bytes, for no rank, and for a link that carries nothing."""
    whole("ranks", ranks)
    if not (isinstance(nbytes, Real) and nbytes >= 0):
        raise ValueError(f"nbytes must be 0 or more, got {nbytes!r}")
    for link in links:
        if not isinstance(link, Link):
            raise ValueError(f"a link must be a Link(latency, bandwidth), got {link!r:.60}")
        if not (link.latency >= 0 and link.bandwidth > 0):
            raise ValueError(f"bandwidth must be above 0, latency 0 or more: {link}")


def ring_seconds(nbytes: float, ranks: int, link: Link) -> float:
    """An all-reduce of `nbytes` as a flat ring: 2 (N - 1) steps of one chunk."""
    require_message(nbytes, ranks, link)
    return 2 * (ranks - 1) * (link.latency + nbytes / ranks / link.bandwidth)


def flat_ring_seconds(
    nbytes: float, nodes: int, per_node: int, inside: Link, between: Link
) -> float:
    """The same around nodes, by one card of each, as NCCL reckons it.

    All bytes pass the slowest link, but a step has the latency of its own.
    """
    require_message(nbytes, nodes, inside, between)
    whole("per_node", per_node)
    ranks = nodes * per_node
    if nodes == 1:
        return ring_seconds(nbytes, ranks, inside)
    latency = (ranks - nodes) * inside.latency + (nodes - 1) * between.latency
    return 2 * (latency + (ranks - 1) / ranks * nbytes / between.bandwidth)


def tree_seconds(nbytes: float, ranks: int, link: Link) -> float:
    """The same up and down a binary tree, the whole tensor on each of log2 N levels."""
    require_message(nbytes, ranks, link)
    return 2 * (int(ranks) - 1).bit_length() * (link.latency + nbytes / link.bandwidth)


def hierarchical_seconds(
    nbytes: float, nodes: int, per_node: int, inside: Link, between: Link
) -> float:
    """An all-reduce in three: scatter in each node, add up parts across nodes, gather."""
    whole("per_node", per_node)
    in_node = ring_seconds(nbytes, per_node, inside)  # its two halves, before and after
    return in_node + ring_seconds(nbytes / per_node, nodes, between)


def all_gather_seconds(
    nbytes: float, ranks: int, per_node: int, inside: Link, between: Link
) -> float:
    """An all-gather, or a reduce-scatter, of `nbytes` in all: half of an all-reduce.

    A last node that is in part empty counts as a full one.
    """
    require_message(nbytes, ranks, inside, between)
    whole("per_node", per_node)
    per_node = min(ranks, per_node)
    nodes = -(-ranks // per_node)
    latency = (ranks - nodes) * inside.latency + (nodes - 1) * between.latency
    moved_inside = nbytes * (per_node - 1) / per_node / inside.bandwidth
    # rings that leave each node by all of its cards
    moved_between = nbytes * (ranks - 1) / ranks / (per_node * between.bandwidth)
    return latency + max(moved_inside, moved_between * (nodes > 1))


def all_to_all_seconds(
    nbytes: float, ranks: int, per_node: int, inside: Link, between: Link
) -> float:
    """Every rank sends `nbytes` in equal parts to all of the group; its own part stays."""
    require_message(nbytes, ranks, inside, between)
    whole("per_node", per_node)
    here = min(ranks, per_node)
    moved_inside = nbytes * (here - 1) / ranks
    moved_between = nbytes * (ranks - here) / ranks
    latency = between.latency if ranks > here else inside.latency * (ranks > 1)
    return latency + max(moved_inside / inside.bandwidth, moved_between / between.bandwidth)
