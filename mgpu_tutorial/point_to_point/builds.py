"""What the reader's `swap` must do."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mgpu_tutorial.lab.teach.build import Builder, expect
from mgpu_tutorial.lab.teach.build import launch as launch_ranks
from mgpu_tutorial.point_to_point.messages import swap

launch = partial(launch_ranks, trace=True, device="cpu", timeout=5)  # traced: who waits?


def partners(
    rank: int, world_size: int, swap: Callable, peers: list[int], tensor: Tensor
) -> tuple[Tensor, Tensor]:
    """Each rank swaps `tensor + rank` with its peer; returns what came and what it sent."""
    mine = tensor + rank
    return swap(mine, peers[rank]), mine


def two(function: Callable) -> None:
    """give each of two ranks the number of the other"""
    results = launch(partners, 2, function, [1, 0], torch.zeros(1)).results
    for rank, (came, _) in enumerate(results):
        expect(came, torch.tensor([1.0 - rank]), f"rank {rank} of 2 receives")


def any_pair(function: Callable) -> None:
    """let any two ranks swap: 0 with 2 and 1 with 3, then 0 with 3 and 1 with 2"""
    for peers in ([2, 3, 0, 1], [3, 2, 1, 0]):
        results = launch(partners, 4, function, peers, torch.zeros(1)).results
        for rank, (came, _) in enumerate(results):
            expect(came, torch.tensor([float(peers[rank])]), f"rank {rank} of 4 receives")


def any_size(function: Callable) -> None:
    """swap tensors of any shape and dtype, such as a million whole numbers"""
    many = torch.arange(1_000_000).view(1000, 1000)
    results = launch(partners, 2, function, [1, 0], many).results
    for rank, (came, _) in enumerate(results):
        expect(came, many + 1 - rank, f"rank {rank} of 2 receives")


def leaves_mine(function: Callable) -> None:
    """leave the tensor that it sends as it is"""
    results = launch(partners, 2, function, [1, 0], torch.zeros(1)).results
    for rank, (_, mine) in enumerate(results):
        expect(mine, torch.tensor([float(rank)]), f"after it, rank {rank}'s own tensor is")


build = Builder("point_to_point", {swap: [two, any_pair, any_size, leaves_mine]})
