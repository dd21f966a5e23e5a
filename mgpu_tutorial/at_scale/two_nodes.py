"""Apparatus, not the lesson: two nodes of four ranks each, timed and counted."""

from collections.abc import Callable

from mgpu_tutorial.at_scale import hierarchy
from mgpu_tutorial.lab import Table, launch
from mgpu_tutorial.shared.cost_model.links import Link, hierarchical_seconds, ring_seconds


def time_hierarchy(inside: Link, between: Link, nbytes: int = 2**20) -> dict[str, float]:
    """Launches two nodes of four ranks; the least seconds of each way."""
    methods = [hierarchy.flat_ring, hierarchy.hierarchical]
    given = methods, 4, nbytes, inside, between
    seconds = launch(hierarchy.time_methods, 8, *given).results[0]
    names = [method.__name__ for method in methods]
    return dict(zip(names, seconds, strict=True))


def hierarchy_table(times: dict[str, float], inside: Link, between: Link) -> Table:
    """Measured milliseconds of both ways, and those of the formulas."""
    size = 2**20
    formulas = {
        "flat_ring": ring_seconds(size, 8, between),
        "hierarchical": hierarchical_seconds(size, 2, 4, inside, between),
    }
    rows = [
        [name, f"{1e3 * seconds:.1f}", f"{1e3 * times[name]:.1f}"]
        for name, seconds in formulas.items()
    ]
    return Table(["ms", "by formula", "measured"], rows)


def crossings(worker: Callable[[int, int], object], per_node: int = 4) -> list:
    """Launches two nodes of ranks; what each returned, and the messages between nodes.

    Just `...` where no rank returned anything yet.
    """
    results = launch(hierarchy.count_crossings, 2 * per_node, worker, per_node).results
    if all(value is ... for value, _ in results):
        return ...
    return [[value for value, _ in results], sum(count for _, count in results)]
