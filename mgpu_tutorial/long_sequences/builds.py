"""What the merge of two blocks, the ring and the zig-zag must do."""

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.long_sequences.ring import (
    attend,
    contiguous,
    merge,
    ring_attention,
    striped,
    zigzag,
)


def _merged(function: Callable, sizes: list[int], scale: float = 1.0) -> None:
    """Merge blocks of these sizes, one after the other, and compare with all keys at once."""
    torch.manual_seed(0)
    q = scale * torch.randn(1, 2, 3, 4, dtype=torch.float64)
    kv = torch.randn(2, 1, 2, sum(sizes), 4, dtype=torch.float64)
    found, *blocks = [attend(q, *part, torch.tensor(False)) for part in kv.split(sizes, 3)]
    for block in blocks:
        found = function(*found, *block)
    what = f"blocks of {' and '.join(map(str, sizes))} keys: the"
    expect(type(found), tuple, f"{what} type of what is returned")
    out, lse = attend(q, *kv, torch.tensor(False))
    expect(found[1], lse, f"{what} log-sum-exp", within=1e-9 * scale)  # the output needs it
    expect(found[0], out, f"{what} output", within=1e-9 * scale)


def is_attention_over_both(function: Callable) -> None:
    """give the attention over all keys, for two halves of them"""
    _merged(function, [4, 4])


def goes_on(function: Callable) -> None:
    """return a log-sum-exp with which a third block can be merged"""
    _merged(function, [3, 2, 3])


def stays_finite(function: Callable) -> None:
    """stay finite where scores are around 1,000"""
    _merged(function, [4, 4], scale=1000.0)


def _differences(rank: int, world_size: int, ring: Callable, deal: Callable) -> dict:
    """How far output, log-sum-exp and gradients are from those of one process."""
    torch.manual_seed(0)
    length = 6 * world_size
    whole = torch.randn(3, 1, 2, length, 4, dtype=torch.float64).requires_grad_()
    wanted = scaled_dot_product_attention(*whole, is_causal=True)
    positions = torch.arange(length)
    _, lse = attend(*whole, positions > positions[:, None])
    wanted.square().sum().backward()
    mine = deal(length, rank, world_size)
    part = whole.detach()[..., mine, :].requires_grad_()
    out, own = ring(*part, deal)
    if out.requires_grad:
        out.square().sum().backward()
    gradients = torch.zeros_like(part) if part.grad is None else part.grad
    names = "output", "log-sum-exp", *(f"gradient of {name}" for name in "qkv")
    pairs = zip((out, own, *gradients), (wanted, lse, *whole.grad), strict=True)
    far = (largest_difference(one, other[..., mine, :]) for one, other in pairs)
    return dict(zip(names, far, strict=True))


def equals_one_process(function: Callable) -> None:
    """equal one process on 1 to 4 ranks and with any `deal`, with all gradients"""
    for n, deal in (
        (1, contiguous),
        (2, contiguous),
        (3, contiguous),
        (3, striped),
        (4, zigzag),
    ):
        results = launch(_differences, n, function, deal).results
        for name in results[0]:
            for rank, far in enumerate(found[name] for found in results):
                where = f"{deal.__name__}, on rank {rank} of {n}"
                assert far < 1e-9, f"{where}: the {name} is up to {far:.2g} off"


def sends_a_hop_less(function: Callable) -> None:
    """send one message less than there are ranks, each to the right"""

    def forward(rank: int, world_size: int) -> None:
        function(*torch.randn(3, 1, 2, 6, 4), contiguous)

    report = launch(forward, 4, trace=True)
    for rank in range(4):
        peers = [e.peer for e in report.events if e.rank == rank and e.sends]
        expect(peers, [(rank + 1) % 4] * 3, f"on 4 ranks, rank {rank} sends to ranks")


def pairs_front_and_end(function: Callable) -> None:
    """give rank 1 of 4 the second chunk and the second-to-last"""
    expect(function(16, 1, 4), torch.tensor([2, 3, 12, 13]), "16 tokens: rank 1 gets")
    expect(function(16, 0, 4), torch.tensor([0, 1, 14, 15]), "16 tokens: rank 0 gets")


def deals_evenly(function: Callable) -> None:
    """deal each token once, and equally many pairs of a query and a key to every rank"""
    for length, n in (24, 4), (12, 3), (6, 1):
        dealt = [function(length, rank, n) for rank in range(n)]
        what = f"{length} tokens on {n} ranks:"
        every = torch.cat(dealt).sort().values
        expect(every, torch.arange(length), f"{what} the positions of all ranks, sorted")
        pairs = [int((places + 1).sum()) for places in dealt]
        expect(pairs, [length * (length + 1) // 2 // n] * n, f"{what} the pairs of each")


def refuses(function: Callable) -> None:
    """refuse 12 tokens on 4 ranks, which need 8 chunks"""
    try:
        found = function(12, 0, 4)
    except ValueError:
        return
    raise AssertionError(f"no ValueError, but {found.tolist()}")


build = Builder(
    "long_sequences",
    {
        merge: [is_attention_over_both, goes_on, stays_finite],
        ring_attention: [equals_one_process, sends_a_hop_less],
        zigzag: [pairs_front_and_end, deals_evenly, refuses],
    },
)
