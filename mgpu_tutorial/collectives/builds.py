"""What the two halves of the ring must do, and the ring made of them."""

from collections.abc import Callable

import torch

from mgpu_tutorial.collectives import ring
from mgpu_tutorial.lab.teach.build import Builder, launch

RANKS = 2, 3, 5


def finish_chunk(rank: int, world_size: int, half: Callable, count: int) -> list[int]:
    """Rank r puts 10**r into `count` places; what its chunk r + 1 holds after the half."""
    tensor = torch.full((count,), 10**rank)
    half(tensor.tensor_split(world_size))
    return tensor.tensor_split(world_size)[(rank + 1) % world_size].tolist()


def hand_out(rank: int, world_size: int, half: Callable, count: int) -> torch.Tensor:
    """Random numbers everywhere, of which chunk r + 1 counts; all of them after the half."""
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(rank))
    half(tensor.tensor_split(world_size))
    return tensor


def add_up(rank: int, world_size: int, all_reduce: Callable, count: int) -> list[int]:
    """Rank r puts 10**r into `count` places; what they hold after the all-reduce."""
    tensor = torch.full((count,), 10**rank)
    all_reduce(tensor)
    return tensor.tolist()


def _finished(half: Callable, n: int, count: int, where: str) -> None:
    """Each of n ranks finishes its chunk of `count` numbers."""
    for rank, found in enumerate(launch(finish_chunk, n, half, count).results):
        chunk = (rank + 1) % n
        wanted = [int("1" * n)] * len(torch.arange(count).tensor_split(n)[chunk])
        what = f"{where}, chunk {chunk} of rank {rank} holds {found}"
        assert found == wanted, f"{what}, expected {wanted}"


def finish(function: Callable) -> None:
    """finish chunk r + 1 on rank r, in place, on 2, 3 and 5 ranks"""
    for n in RANKS:
        _finished(function, n, n, f"on {n} ranks, where rank r brings 10**r")


def finish_uneven(function: Callable) -> None:
    """finish chunks of unequal lengths too: 3, 2 and 2 numbers, or 1, 1 and 0"""
    for count in (7, 2):
        _finished(function, 3, count, f"with {count} numbers on 3 ranks")


def right_only(function: Callable) -> None:
    """send three messages from each of four ranks, all to the right neighbour"""
    report = launch(finish_chunk, 4, function, 4, trace=True)
    for rank in range(4):
        found = [e.peer for e in report.events if e.sends and e.rank == rank]
        wanted = [(rank + 1) % 4] * 3
        what = f"on 4 ranks, rank {rank} sends to the ranks {found}"
        assert found == wanted, f"{what}, expected {wanted}"


def gather_all(function: Callable) -> None:
    """hand out the finished chunks to all ranks, bit for bit, on 2, 3 and 5 ranks"""
    for n in RANKS:
        for rank, tensor in enumerate(launch(hand_out, n, function, 120).results):
            for i, chunk in enumerate(tensor.tensor_split(n)):
                seed = torch.Generator().manual_seed((i - 1) % n)
                sent = torch.randn(120, generator=seed).tensor_split(n)[i]
                what = f"on {n} ranks, chunk {i} of rank {rank} is not what was sent"
                off = (chunk - sent).abs()
                count = f"{int((off > 0).sum())} of {len(sent)} numbers differ"
                assert torch.equal(chunk, sent), f"{what}: {count}, by up to {off.max():.1g}"


def sums(function: Callable) -> None:
    """leave the sum in the tensor, on 1, 2, 3 and 5 ranks"""
    for n in (1, *RANKS):
        wanted = [int("1" * n)] * 7
        for rank, one in enumerate(launch(add_up, n, function, 7).results):
            assert one == wanted, f"on {n} ranks, rank {rank} holds {one}, expected {wanted}"


def same_bits(function: Callable) -> None:
    """leave the same bits on every rank"""
    first, *others = launch(ring.reduce_by, 4, function, 1003).results
    for rank, other in enumerate(others, 1):
        differ = int((first != other).sum())
        assert not differ, f"{differ} of 1003 numbers differ between ranks 0 and {rank}"


def bytes_of_a_ring(function: Callable) -> None:
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
