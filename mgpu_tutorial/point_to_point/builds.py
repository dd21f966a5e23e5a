"""What the reader's `swap` must do."""

from collections.abc import Callable

import torch
from torch import Tensor

from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.point_to_point.messages import swap


def swapped(
    rank: int, world_size: int, swap: Callable, peers: list[int], tensor: Tensor
) -> tuple[Tensor, Tensor]:
    """Each rank swaps `tensor + rank` with its peer; returns what came and what it sent."""
    mine = tensor + rank
    came = swap(mine, peers[rank])
    if not isinstance(came, Tensor | None):
        why = ". recv fills its argument, and returns who sent" if came == peers[rank] else ""
        came = f"{came!r:.60}, which is no tensor{why}"
    return came, mine


def _swap(function: Callable, peers: list[int], tensor: Tensor) -> Report:
    """Traced, so that who hangs is said to wait for whom."""
    how = {"trace": True, "device": "cpu", "timeout": 2}
    report = launch(swapped, len(peers), function, peers, tensor, **how)
    for rank, (came, mine) in enumerate(report.results):
        assert not isinstance(came, str), f"rank {rank} of {len(peers)} returns {came}"
        kept = torch.equal(mine, tensor + rank)
        own = "" if kept else f" (and its own tensor was overwritten: {mine.flatten()[0]:g})"
        expect(came, tensor + peers[rank], f"rank {rank} of {len(peers)}{own} receives")
        expect(mine, tensor + rank, f"after it, rank {rank}'s own tensor is")
    return report


def any_pair(function: Callable) -> None:
    """give any two ranks each other's number, and leave their own as it is"""
    for peers in ([1, 0], [2, 3, 0, 1], [3, 2, 1, 0]):
        _swap(function, peers, torch.zeros(1))


def any_size(function: Callable) -> None:
    """swap tensors of any shape and dtype, such as a million whole numbers"""
    _swap(function, [1, 0], torch.tensor(0.0))
    _swap(function, [1, 0], torch.arange(1_000_000).view(1000, 1000))


def one_message(function: Callable) -> None:
    """send one message to its peer and receive one from it, and nothing else"""
    peers = [2, 3, 0, 1]
    report = _swap(function, peers, torch.zeros(3, 2))  # three rows, and one message
    for rank, peer in enumerate(peers):
        calls = [e for e in report.events if e.rank == rank and e.kind != "wait"]
        called = ", then ".join(
            e.op if e.peer is None else f"{e.op} {'to' if e.sends else 'from'} rank {e.peer}"
            for e in calls
        )
        sides = sorted((e.sends, e.peer) for e in calls if e.kind == "p2p")
        is_swap = sides == [(False, peer), (True, peer)] and len(calls) == 2
        assert is_swap, f"rank {rank} of 4, whose peer is {peer}: {called or 'no message'}"


build = Builder("point_to_point", {swap: [any_pair, one_message, any_size]})
