"""What the reader's `swap` must do."""

from collections.abc import Callable

import torch
from torch import Tensor

from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.point_to_point.messages import swap


def swapped(
    rank: int, world_size: int, swap: Callable, peers: list[int], tensor: Tensor
) -> tuple[Tensor, Tensor]:
    """Each rank swaps `tensor + rank` with its peer; returns what came and what it sent."""
    mine = tensor + rank
    return swap(mine, peers[rank]), mine


def _swap(function: Callable, peers: list[int], tensor: Tensor) -> None:
    """Traced, so that who hangs is said to wait for whom."""
    how = {"trace": True, "device": "cpu", "timeout": 2}
    results = launch(swapped, len(peers), function, peers, tensor, **how).results
    for rank, (came, mine) in enumerate(results):
        expect(came, tensor + peers[rank], f"rank {rank} of {len(peers)} receives")
        expect(mine, tensor + rank, f"after it, rank {rank}'s own tensor is")


def any_pair(function: Callable) -> None:
    """give any two ranks each other's number, and leave their own as it is"""
    for peers in ([1, 0], [2, 3, 0, 1], [3, 2, 1, 0]):
        _swap(function, peers, torch.zeros(1))


def any_size(function: Callable) -> None:
    """swap tensors of any shape and dtype, such as a million whole numbers"""
    _swap(function, [1, 0], torch.arange(1_000_000).view(1000, 1000))


build = Builder("point_to_point", {swap: [any_pair, any_size]})
