"""What the merge of two blocks, the ring and the zig-zag must do."""

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.long_sequences.blocks import attend, merge
from mgpu_tutorial.long_sequences.dealing import contiguous, striped, zigzag
from mgpu_tutorial.long_sequences.ring import Deal, ring_attention


def _merged(function: Callable, sizes: list[int], scale: float = 1.0) -> None:
    """Merge blocks of these sizes, one after the other, and compare with all keys at once."""
    torch.manual_seed(0)
    q = scale * torch.randn(1, 2, 3, 4, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, sum(sizes), 4, dtype=torch.float64)
    blocks = [
        attend(q, *kv, torch.tensor(False))
        for kv in zip(k.split(sizes, 2), v.split(sizes, 2), strict=True)
    ]
    found = blocks[0]
    for block in blocks[1:]:
        found = function(*found, *block)
    what = f"blocks of {' and '.join(map(str, sizes))} keys: the"
    expect(type(found), tuple, f"{what} type of what is returned")
    wanted = attend(q, k, v, torch.tensor(False))
    names = "log-sum-exp", "output"  # which needs the log-sum-exp
    for name, one, other in zip(names, found[::-1], wanted[::-1], strict=True):
        expect(one, other, f"{what} {name}", within=1e-9 * scale)


def is_attention_over_both(function: Callable) -> None:
    """give the attention over all keys, for two halves of them"""
    _merged(function, [4, 4])


def goes_on(function: Callable) -> None:
    """return a log-sum-exp with which a third block can be merged"""
    _merged(function, [3, 2, 3])


def stays_finite(function: Callable) -> None:
    """stay finite where scores are around 1,000"""
    _merged(function, [4, 4], scale=1000.0)


def _differences(rank: int, world_size: int, ring: Callable, deal: Deal) -> dict[str, float]:
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


def _compared(function: Callable, deal: Deal, *world_sizes: int) -> None:
    for n in world_sizes:
        results = launch(_differences, n, function, deal).results
        for name in results[0]:
            for rank, far in enumerate(found[name] for found in results):
                assert far < 1e-9, f"on rank {rank} of {n}: the {name} is up to {far:.2g} off"


def equals_one_process(function: Callable) -> None:
    """equal one process on 1 to 4 ranks, with all gradients"""
    _compared(function, contiguous, 1, 2, 3, 4)


def asks_whose_keys(function: Callable) -> None:
    """take each block's positions from `deal`, here every third token"""
    _compared(function, striped, 3)


def sends_a_hop_less(function: Callable) -> None:
    """send one message less than there are ranks, each to the right"""
    report = launch(_forward, 4, function, trace=True)
    for rank in range(4):
        peers = [e.peer for e in report.events if e.rank == rank and e.sends]
        expect(peers, [(rank + 1) % 4] * 3, f"on 4 ranks, rank {rank} sends to ranks")


def _forward(rank: int, world_size: int, ring: Callable) -> None:
    ring(*torch.randn(3, 1, 2, 6, 4), contiguous)


def deals_each_token_once(function: Callable) -> None:
    """give each token to one rank, and equally many to each"""
    for length, n in (24, 4), (12, 3), (6, 1):
        what = f"{length} tokens on {n} ranks: how"
        dealt = [function(length, rank, n) for rank in range(n)]
        expect([len(places) for places in dealt], [length // n] * n, f"{what} many each gets")
        times = torch.cat(dealt).bincount(minlength=length).tolist()
        expect(times, [1] * length, f"{what} often each position is dealt")


def pairs_front_and_end(function: Callable) -> None:
    """give rank 1 of 4 the second chunk and the second-to-last"""
    expect(function(16, 1, 4), torch.tensor([2, 3, 12, 13]), "16 tokens: rank 1 gets")
    expect(function(16, 0, 4), torch.tensor([0, 1, 14, 15]), "16 tokens: rank 0 gets")


def balances(function: Callable) -> None:
    """give every rank equally many pairs of a query and a key up to it"""
    pairs = [int((function(48, rank, 3) + 1).sum()) for rank in range(3)]
    expect(pairs, [392] * 3, "48 tokens on 3 ranks: the pairs of the ranks")


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
        ring_attention: [equals_one_process, asks_whose_keys, sends_a_hop_less],
        zigzag: [deals_each_token_once, pairs_front_and_end, balances, refuses],
    },
)
