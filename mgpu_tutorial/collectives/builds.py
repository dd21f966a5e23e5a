"""What the two halves of the ring must do, and the ring made of them."""

from collections.abc import Callable, Sequence

import torch

from mgpu_tutorial.collectives import ring
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.teach.build import Builder, expect, launch

Half = Callable[[Sequence[torch.Tensor]], None]
AllReduce = Callable[[torch.Tensor], None]
RANKS = 2, 3, 5


def finish_chunk(rank: int, world_size: int, half: Half, count: int) -> list[int]:
    """Rank r puts 10**r into `count` places; what its chunk r + 1 holds after the half."""
    tensor = torch.full((count,), 10**rank)
    half(tensor.tensor_split(world_size))
    return tensor.tensor_split(world_size)[(rank + 1) % world_size].tolist()


def hand_out(rank: int, world_size: int, half: Half, count: int) -> torch.Tensor:
    """Random numbers everywhere, of which chunk r + 1 counts; all of them after the half."""
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(rank))
    half(tensor.tensor_split(world_size))
    return tensor


def add_up(rank: int, world_size: int, all_reduce: AllReduce, count: int) -> list[int]:
    """Rank r puts 10**r into `count` places; what they hold after the all-reduce."""
    tensor = torch.full((count,), 10**rank)
    all_reduce(tensor)
    return tensor.tolist()


def receivers(report: Report) -> list[list[int]]:
    """For each rank the ranks to which it has sent a message."""
    sent = [event for event in report.events if event.sends]
    return [[e.peer for e in sent if e.rank == rank] for rank in range(report.world_size)]


def finish(function: Half) -> None:
    """finish chunk r + 1 on rank r, in place, on 2, 3 and 5 ranks"""
    for n in RANKS:
        found = launch(finish_chunk, n, function, n).results
        expect(found, [[int("1" * n)]] * n, f"on {n} ranks the chunks r + 1")


def finish_uneven(function: Half) -> None:
    """finish chunks of unequal lengths too: 3, 2 and 2 numbers, or 1, 1 and 0"""
    for count in (7, 2):
        found = launch(finish_chunk, 3, function, count).results
        lengths = [len(chunk) for chunk in torch.arange(count).tensor_split(3)]
        wanted = [[111] * lengths[(rank + 1) % 3] for rank in range(3)]
        expect(found, wanted, f"of {count} numbers the chunks r + 1")


def right_only(function: Half) -> None:
    """send three messages from each of four ranks, all to the right neighbour"""
    report = launch(finish_chunk, 4, function, 4, trace=True)
    wanted = [[(rank + 1) % 4] * 3 for rank in range(4)]
    expect(receivers(report), wanted, "the receivers of each rank's messages")


def gather_all(function: Half) -> None:
    """hand out the finished chunks to all ranks, bit by bit, on 2, 3 and 5 ranks"""
    for n in RANKS:
        found = launch(hand_out, n, function, 120).results
        for rank, tensor in enumerate(found):
            for i, chunk in enumerate(tensor.tensor_split(n)):
                seed = torch.Generator().manual_seed((i - 1) % n)
                sent = torch.randn(120, generator=seed).tensor_split(n)[i]
                same = torch.equal(chunk, sent)
                assert same, f"on {n} ranks, chunk {i} of rank {rank} is not what was sent"


def sums(function: AllReduce) -> None:
    """leave the sum in the tensor, on 1, 2, 3 and 5 ranks"""
    for n in (1, *RANKS):
        found = launch(add_up, n, function, 7).results
        expect(found, [[int("1" * n)] * 7] * n, f"on {n} ranks the sums")


def same_bits(function: AllReduce) -> None:
    """leave the same bits on every rank"""
    first, *others = launch(ring.reduce_by, 4, function, 1003).results
    for rank, other in enumerate(others, 1):
        differ = int((first != other).sum())
        expect(differ, 0, f"the numbers that are not the same on ranks 0 and {rank}")


def bytes_of_a_ring(function: AllReduce) -> None:
    """send 2(N−1)/N of the tensor's bytes from each rank"""
    report = launch(ring.reduce_by, 4, function, 1000, trace=True)
    sent = [sum(e.nbytes for e in report.events if e.rank == r and e.sends) for r in range(4)]
    expect(sent, [6000] * 4, "the bytes that each rank sends, of a tensor of 4,000,")


build = Builder(
    "collectives",
    {
        ring.reduce_scatter_ring: [finish, finish_uneven, right_only],
        ring.all_gather_ring: [gather_all, right_only],
        ring.ring_all_reduce: [sums, same_bits, bytes_of_a_ring],
    },
)
