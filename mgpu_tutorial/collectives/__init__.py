"""Collectives: operations that every rank of a group calls together."""

from mgpu_tutorial.collectives.calls import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    different_operations,
    gather,
    pairs,
    reduce,
    reduce_scatter,
    reduce_with,
    scatter,
)
from mgpu_tutorial.collectives.ring import (
    naive_all_reduce,
    naive_seconds,
    reduce_by,
    ring_all_reduce,
    ring_seconds,
    ring_step_by_step,
    tree_seconds,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "different_operations",
    "gather",
    "naive_all_reduce",
    "naive_seconds",
    "pairs",
    "reduce",
    "reduce_by",
    "reduce_scatter",
    "reduce_with",
    "ring_all_reduce",
    "ring_seconds",
    "ring_step_by_step",
    "scatter",
    "tree_seconds",
]
