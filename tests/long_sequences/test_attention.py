"""Each way to share a sequence gives one process's attention, or refuses on all ranks."""

from itertools import product

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from mgpu_tutorial.lab import Ledger, RankFailed
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.long_sequences import fast, others, ring
from mgpu_tutorial.long_sequences.ring import contiguous, striped, zigzag


def whole(kv_heads):
    """Inputs of 24 tokens with their gradients, and the output of one process."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 24, 6, dtype=torch.float64)
    k, v = torch.randn(2, 2, kv_heads, 24, 6, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    (out * torch.arange(6)).square().sum().backward()
    return inputs, out


WAYS = {**others.METHODS, "fast ring": lambda q, k, v, deal: fast.FastRing.apply(q, k, v)}


def distances(rank, world_size):
    """How far output and gradients of this rank's tokens are from these, by way and heads."""
    far = {}
    deals = contiguous, zigzag, striped
    for method, deal, kv_heads in product(WAYS, deals, (1, 2, 4)):
        if method == "ulysses" and (deal is not contiguous or 4 % world_size):
            continue
        if method == "fast ring" and deal is not zigzag:
            continue
        inputs, wanted = whole(kv_heads)
        mine = deal(24, rank, world_size)
        own = [x.detach()[:, :, mine].requires_grad_() for x in inputs]
        out = WAYS[method](*own, deal)
        (out * torch.arange(6)).square().sum().backward()
        found = [out, *(x.grad for x in own)]
        right = [x[:, :, mine] for x in (wanted, *(x.grad for x in inputs))]
        far[method, deal.__name__, kv_heads] = largest_difference(found, right)
        assert method != "ulysses" or torch.equal(out, right[0])  # nothing is merged
    return far


@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, id="once")])
def test_each_way_is_one_process(ranks, world_size):
    for far in ranks(world_size, distances, device="cpu").results:
        assert {way: d for way, d in far.items() if d > 1e-12} == {}


def kept(rank, world_size, attention, length):
    qkv = [x.requires_grad_() for x in torch.randn(3, 1, 4, length // world_size, 16)]
    ledger = Ledger()
    with ledger.saved_for_backward():
        held = attention(*qkv, contiguous)
    return ledger.saved_now(qkv[0].device), held is None


def test_what_the_ring_keeps_does_not_grow_with_the_keys(ranks):
    """Four ranks take four times as many tokens; the loop keeps four times the scores."""
    by_hand, by_loop = (
        {n: ranks(n, kept, way, 512 * n).results[0][0] for n in (1, 4)}
        for way in (ring.RingAttention.apply, ring.ring_attention)
    )
    assert by_hand[1] == by_hand[4]
    assert 3.5 < by_loop[4] / by_loop[1] < 4.5


def call(rank, world_size, function, *given):
    function(*given)


KV = torch.randn(2, 1, 2, 4, 2)


@pytest.mark.parametrize(
    "refused, says",
    [
        ((others.ulysses, KV[0], *KV), "2 heads, 2 of keys"),
        ((others.ulysses, torch.randn(1, 6, 4, 2), *KV), "6 heads, 2 of keys"),
        ((contiguous, 32, 0, 3), "32 tokens"),
        (
            (ring.RingAttention.apply, *torch.randn(3, 1, 4, 3, 2), zigzag),
            "9 tokens: pad them to 12",
        ),
    ],
)
def test_what_does_not_divide_is_refused_by_all_before_anything_is_sent(ranks, refused, says):
    with pytest.raises(RankFailed, match="ranks 0, 1 and 2 raised ValueError") as failed:
        ranks(3, call, *refused, trace=True)
    assert says in " ".join(str(failed.value).split())
    assert not [e for e in failed.value.report.events if e.sends or e.kind == "collective"]


def test_blocks_in_16_bits_are_merged_as_exactly_as_pytorch_attends():
    """A block that computed in 16 bits itself would be several times as far off."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 64, 32, dtype=torch.bfloat16)
    exact = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    theirs = scaled_dot_product_attention(q, k, v, is_causal=True)

    def merged(attend):
        later = torch.arange(64) > torch.arange(64)[:, None]
        blocks = zip(*(x.chunk(4, -2) for x in (k, v)), later.chunk(4, -1), strict=True)
        found, *others = [attend(q, *block) for block in blocks]
        for block in others:
            found = ring.merge(*found, *block)
        return found[0].bfloat16()

    def in_16_bits(q, k, v, later):
        scores = ring.scores_of(q, k, later)
        lse = scores.logsumexp(-1, keepdim=True)
        return (scores - lse).exp() @ v, lse

    off = [(out - exact).norm() for out in (theirs, merged(ring.attend), merged(in_16_bits))]
    assert off[1] < 1.2 * off[0] and 3 * off[0] < off[2] < 10 * off[0]
