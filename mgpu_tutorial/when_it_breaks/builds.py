"""What the tool `replay` must do, on real ranks of which some compute otherwise."""

from collections.abc import Callable

import torch

from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.when_it_breaks import jobs


def _replayed(
    rank: int, world_size: int, replay: Callable, bad: list[int], by: float
) -> list[int]:
    """Ranks in `bad` compute one number of each gradient larger by the factor `by`."""

    def gradient_of(batch: torch.Tensor) -> torch.Tensor:
        gradient = batch.double().cumsum(0)
        gradient[2] *= by if rank in bad else 1
        return gradient

    return replay(gradient_of, torch.arange(1.0, 6.0) + 10 * rank)


def _with_nan(rank: int, world_size: int, replay: Callable) -> tuple[list[int], int]:
    """A gradient that is NaN on every GPU; also how many gradients this rank computed."""
    calls = []

    def gradient_of(batch: torch.Tensor) -> torch.Tensor:
        calls.append(batch)
        return batch / batch.min()

    return replay(gradient_of, torch.arange(3.0) * 0), len(calls)


def _alone(rank: int, world_size: int, replay: Callable) -> str:
    try:
        return f"it returned {replay(lambda batch: batch, torch.ones(2))}"
    except ValueError:
        return "ValueError"


def _expect(replay: Callable, world_size: int, bad: list[int], pairs: list[int], by=2.0):
    for rank, found in enumerate(launch(_replayed, world_size, replay, bad, by).results):
        where = f"{world_size} ranks, bad GPUs {bad}: "
        assert found == pairs, where + f"rank {rank} returned {found}, expected {pairs}"


def finds_nothing(replay: Callable) -> None:
    """return an empty list where all ranks compute alike, from different batches"""
    for world_size in (2, 4):
        _expect(replay, world_size, [], [])


def names_both_pairs(replay: Callable) -> None:
    """name the bad rank and the rank before it, on every rank"""
    _expect(replay, 4, [2], [1, 2])


def goes_round(replay: Callable) -> None:
    """let rank 0 replay the batch of the last rank"""
    _expect(replay, 3, [0], [0, 2])


def sees_the_last_bit(replay: Callable) -> None:
    """notice a difference in the last bit"""
    _expect(replay, 4, [3], [2, 3], 1 + 2.0**-52)


def takes_nan_for_nan(replay: Callable) -> None:
    """return an empty list where a gradient is NaN on both ranks; that is no GPU's fault"""
    for rank, (found, _) in enumerate(launch(_with_nan, 2, replay).results):
        assert found == [], f"2 ranks, all gradients NaN: rank {rank} returned {found}"


def computes_two(replay: Callable) -> None:
    """compute two gradients on each rank, however many ranks there are"""
    for rank, (_, calls) in enumerate(launch(_with_nan, 4, replay).results):
        expect(calls, 2, f"4 ranks: the gradients that rank {rank} computed")


def refuses_to_be_alone(replay: Callable) -> None:
    """raise a ValueError on one rank, which would only replay its own batch"""
    expect(launch(_alone, 1, replay).results[0], "ValueError", "on one rank")


ROWS = [finds_nothing, names_both_pairs, goes_round, sees_the_last_bit]
ROWS += [takes_nan_for_nan, computes_two, refuses_to_be_alone]
build = Builder("when_it_breaks", {jobs.replay: ROWS})
