"""Several workers in the ranks of one launch, for it takes longer than most of them do."""

from collections.abc import Callable

from mgpu_tutorial.lab import launch


def in_turn(rank: int, world_size: int, calls: list[Callable]) -> list:
    return [call(rank, world_size) for call in calls]


def together(world_size: int, *calls: Callable, **options) -> list[list]:
    """For each of the `calls` (a worker, or a partial of one) what the ranks return."""
    results = launch(in_turn, world_size, list(calls), **options).results
    return [list(ranks) for ranks in zip(*results, strict=True)]
