"""What the two halves of the ring must do, and the ring made of them."""

from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist

from mgpu_tutorial.collectives import ring
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.teach.build import Builder, expect, launch


def after(
    rank: int, world_size: int, function: Callable, tensors: torch.Tensor, cut: bool
) -> torch.Tensor:
    """What a rank's tensor holds after `function` was given it, or with `cut` its chunks."""
    tensor = tensors[rank].to(torch.get_default_device())
    function(tensor.tensor_split(world_size) if cut else tensor)
    return tensor


def _run(function: Callable, tensors: torch.Tensor, cut: bool) -> Report:
    """A run that is traced, so that who hangs is said to wait for whom."""
    return launch(after, len(tensors), function, tensors, cut, trace=True, timeout=5)


def _noise(ranks: int, count: int) -> torch.Tensor:
    return torch.randn(ranks, count, generator=torch.Generator().manual_seed(0))


def finish(function: Callable) -> None:
    """finish chunk r + 1 on rank r, in place, also where one is shorter than another"""
    for n, count in ((2, 2), (3, 3), (5, 5), (3, 7), (3, 2)):
        tensors = (10 ** torch.arange(n))[:, None].repeat(1, count)  # a digit for each rank
        wanted = tensors.sum(0).tensor_split(n)
        for rank, tensor in enumerate(_run(function, tensors, cut=True).results):
            chunk = (rank + 1) % n
            what = f"on {n} ranks with {count} numbers of 10**r, chunk {chunk} of rank {rank}"
            expect(tensor.tensor_split(n)[chunk], wanted[chunk], what)


def gather_all(function: Callable) -> None:
    """hand out the finished chunks to all ranks, bit for bit, on 2, 3 and 5 ranks"""
    for n in (2, 3, 5):
        tensors = _noise(n, 122)
        sent = [tensors[i - 1].tensor_split(n)[i] for i in range(n)]
        for rank, tensor in enumerate(_run(function, tensors, cut=True).results):
            for i, (chunk, wanted) in enumerate(
                zip(tensor.tensor_split(n), sent, strict=True)
            ):
                what = f"on {n} ranks, chunk {i} of rank {rank}"
                expect(chunk, wanted, what, within=1e-5)
                off = (chunk - wanted).abs().max()
                assert not off, f"{what} is not what was sent, but off by {off:.1g}"


def sums(function: Callable) -> None:
    """leave the sum in the tensor, the same bits on each of 1, 2, 3 and 5 ranks"""
    for n in (1, 2, 3, 5):
        tensors = _noise(n, 1003)
        first, *others = _run(function, tensors, cut=False).results
        expect(first, tensors.double().sum(0), f"on {n} ranks, rank 0 holds", within=1e-5)
        for rank, other in enumerate(others, 1):
            differ = f"on {n} ranks, {int((first != other).sum())} of 1003 numbers"
            assert torch.equal(first, other), f"{differ} differ between ranks 0 and {rank}"


def _in_pairs(
    rank: int, world_size: int, function: Callable, tensors: torch.Tensor
) -> torch.Tensor:
    """Of four ranks 1 and 3 are a ring, and so are 0 and 2."""
    groups = [dist.new_group([first, first + 2]) for first in (0, 1)]
    tensor = tensors[rank].to(torch.get_default_device())
    function(tensor, groups[rank % 2])
    return tensor


def sums_in_a_group(function: Callable) -> None:
    """sum over the ranks of a group alone, such as ranks 1 and 3 of four"""
    tensors = (10 ** torch.arange(4))[:, None].repeat(1, 3)  # a digit for each rank
    found = launch(_in_pairs, 4, function, tensors, trace=True, timeout=5).results
    for rank, tensor in enumerate(found):
        wanted = tensors[rank] + tensors[(rank + 2) % 4]
        what = f"groups of ranks 0 and 2, 1 and 3, with numbers of 10**r: rank {rank} holds"
        expect(tensor, wanted, what)


def bytes_of_a_ring(function: Callable) -> None:
    """send 2(N−1)/N of the tensor's bytes from each rank, in 2(N−1) messages to the right"""
    report = _run(function, _noise(4, 1000), cut=False)
    for rank in range(4):
        mine = [e for e in report.events if e.rank == rank and e.sends]
        sent = sum(e.nbytes for e in mine)
        expect(
            [e.peer for e in mine], [(rank + 1) % 4] * 6, f"the receivers from rank {rank}"
        )
        expect(sent, 6000, f"of a tensor of 4,000 bytes on 4 ranks, rank {rank} sends")


def rounds(report: Report) -> int:
    """How many messages of a run must travel one after another, by the order of the calls.

    A message takes one round from the moment at which its sender has sent and its receiver
    has asked. `send`, `recv` and `wait` last until it is over; `isend` and `irecv` do not.
    """
    left = {r: [e for e in report.events if e.rank == r] for r in range(report.world_size)}
    now = dict.fromkeys(left, 0)
    ready = defaultdict(list)  # by sender, receiver and side: when each message was begun
    begun = {}  # by rank and index of a call: its message
    is_moving = True

    def end_of(sender: int, receiver: int, number: int) -> int | None:
        sides = ready[sender, receiver, "sends"], ready[sender, receiver, "asks"]
        return None if number >= min(map(len, sides)) else 1 + max(s[number] for s in sides)

    while is_moving:
        is_moving = False
        for rank, calls in left.items():
            while calls:
                event = calls[0]
                call = rank, event.index if event.of is None else event.of
                if event.kind == "p2p" and call not in begun:
                    pair = (rank, event.peer) if event.sends else (event.peer, rank)
                    side = ready[*pair, "sends" if event.sends else "asks"]
                    begun[call] = *pair, len(side)
                    side.append(now[rank])
                if event.op in ("send", "recv", "wait") and call in begun:
                    if (end := end_of(*begun[call])) is None:
                        break
                    now[rank] = max(now[rank], end)
                calls.pop(0)
                is_moving = True
    return max(now.values())


def at_the_same_time(function: Callable) -> None:
    """let all ranks send in the same step, not one after another around the ring"""
    found = rounds(_run(function, _noise(6, 12), cut=False))
    late = "a rank that sends only after it has received holds up the ranks after it"
    seen = f"on 6 ranks {found} messages travel one after another, expected 10"
    assert found <= 10, f"{seen}: {late}"


build = Builder(
    "collectives",
    {
        ring.reduce_scatter_ring: [finish],
        ring.all_gather_ring: [gather_all],
        ring.ring_all_reduce: [sums, bytes_of_a_ring, at_the_same_time, sums_in_a_group],
    },
)
