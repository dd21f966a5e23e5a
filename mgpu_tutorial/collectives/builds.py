"""What the two halves of the ring must do, and the ring made of them."""

from collections.abc import Callable, Sequence

import torch

from mgpu_tutorial.collectives import ring
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.teach.build import Builder, launch

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


def same_chunks(found: list[list], wanted: list[list], where: str) -> None:
    """Each rank's chunk r + 1 is what was wanted."""
    for rank, (one, other) in enumerate(zip(found, wanted, strict=True)):
        what = f"{where}, chunk {(rank + 1) % len(found)} of rank {rank}"
        assert one == other, f"{what} holds {one}, expected {other}"


def finish(function: Half) -> None:
    """finish chunk r + 1 on rank r, in place, on 2, 3 and 5 ranks"""
    for n in RANKS:
        found = launch(finish_chunk, n, function, n).results
        same_chunks(found, [[int("1" * n)]] * n, f"on {n} ranks, where rank r brings 10**r")


def finish_uneven(function: Half) -> None:
    """finish chunks of unequal lengths too: 3, 2 and 2 numbers, or 1, 1 and 0"""
    for count in (7, 2):
        found = launch(finish_chunk, 3, function, count).results
        lengths = [len(chunk) for chunk in torch.arange(count).tensor_split(3)]
        wanted = [[111] * lengths[(rank + 1) % 3] for rank in range(3)]
        same_chunks(found, wanted, f"with {count} numbers on 3 ranks")


def right_only(function: Half) -> None:
    """send three messages from each of four ranks, all to the right neighbour"""
    report = launch(finish_chunk, 4, function, 4, trace=True)
    for rank, found in enumerate(receivers(report)):
        wanted = [(rank + 1) % 4] * 3
        what = f"on 4 ranks, rank {rank} sends to the ranks {found}"
        assert found == wanted, f"{what}, expected {wanted}"


def gather_all(function: Half) -> None:
    """hand out the finished chunks to all ranks, bit for bit, on 2, 3 and 5 ranks"""
    for n in RANKS:
        found = launch(hand_out, n, function, 120).results
        for rank, tensor in enumerate(found):
            for i, chunk in enumerate(tensor.tensor_split(n)):
                seed = torch.Generator().manual_seed((i - 1) % n)
                sent = torch.randn(120, generator=seed).tensor_split(n)[i]
                what = f"on {n} ranks, chunk {i} of rank {rank} is not what was sent"
                off = (chunk - sent).abs()
                count = f"{int((off > 0).sum())} of {len(sent)} numbers differ"
                assert torch.equal(chunk, sent), f"{what}: {count}, by up to {off.max():.1g}"


def sums(function: AllReduce) -> None:
    """leave the sum in the tensor, on 1, 2, 3 and 5 ranks"""
    for n in (1, *RANKS):
        found = launch(add_up, n, function, 7).results
        wanted = [int("1" * n)] * 7
        for rank, one in enumerate(found):
            assert one == wanted, f"on {n} ranks, rank {rank} holds {one}, expected {wanted}"


def same_bits(function: AllReduce) -> None:
    """leave the same bits on every rank"""
    first, *others = launch(ring.reduce_by, 4, function, 1003).results
    for rank, other in enumerate(others, 1):
        differ = int((first != other).sum())
        assert not differ, f"{differ} of 1003 numbers differ between ranks 0 and {rank}"


def bytes_of_a_ring(function: AllReduce) -> None:
    """send 2(N−1)/N of the tensor's bytes from each rank"""
    report = launch(ring.reduce_by, 4, function, 1000, trace=True)
    for rank in range(4):
        sent = sum(e.nbytes for e in report.events if e.rank == rank and e.sends)
        what = f"of a tensor of 4,000 bytes on 4 ranks, rank {rank} sends {sent:,} bytes"
        assert sent == 6000, f"{what}, expected 6,000"


build = Builder(
    "collectives",
    {
        ring.reduce_scatter_ring: [finish, finish_uneven, right_only],
        ring.all_gather_ring: [gather_all, right_only],
        ring.ring_all_reduce: [sums, same_bits, bytes_of_a_ring],
    },
)
