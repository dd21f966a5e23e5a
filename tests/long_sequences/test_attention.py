"""Each way to share a sequence gives one process's attention, and sends what it says."""

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.long_sequences import figures, others, ring
from mgpu_tutorial.long_sequences.block import loss_and_gradients
from mgpu_tutorial.long_sequences.ring import attend, contiguous, merge, striped, zigzag

DEALS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}


def by_autograd(q, k, v, deal):
    return ring.ring_attention(q, k, v, deal)[0]


def by_heads(q, k, v, deal):
    return others.ulysses(q, k, v)


@cache
def whole(kv_heads):
    """Inputs of 24 tokens with their gradients, and by hand the output, query by query."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 24, 6, dtype=torch.float64)
    k, v = torch.randn(2, 2, kv_heads, 24, 6, dtype=torch.float64)
    inputs = q, k, v = [x.clone().requires_grad_() for x in (q, k, v)]
    rows = []
    for head in range(4):
        of = head * kv_heads // 4
        for i in range(24):
            scores = (q[:, head, i, None] * k[:, of, : i + 1]).sum(-1) / 6**0.5
            rows.append((scores.softmax(-1)[..., None] * v[:, of, : i + 1]).sum(1))
    out = torch.stack(rows, 1).unflatten(1, (4, 24))
    (out * torch.arange(6)).square().sum().backward()
    return inputs, out


def distances(rank, world_size):
    """How far output and gradients of this rank's tokens are from these, by way and heads."""
    ways = [(by_heads, contiguous)] if 4 % world_size == 0 else []
    for attention in ring.RingAttention.apply, by_autograd, others.gathered_attention:
        ways += [(attention, deal) for deal in DEALS.values()]
    far = {}
    for attention, deal in ways:
        for kv_heads in (1, 2, 4):
            inputs, wanted = whole(kv_heads)
            mine = deal(24, rank, world_size)
            own = [x.detach()[:, :, mine].clone().requires_grad_() for x in inputs]
            out = attention(*own, deal)
            (out * torch.arange(6)).square().sum().backward()
            found = [out, *(x.grad for x in own)]
            right = [x[:, :, mine] for x in (wanted, *(x.grad for x in inputs))]
            way = attention.__qualname__, deal.__name__, kv_heads
            far[way] = largest_difference(found, right)
    return far


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_way_is_one_process(ranks, world_size):
    for far in ranks(world_size, distances).results:
        assert len(far) == (27 if world_size == 3 else 30)
        assert {way: d for way, d in far.items() if d > 1e-12} == {}


def out_by_heads(rank, world_size):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 32, 8)
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    mine = contiguous(32, rank, world_size)
    out = others.ulysses(q[:, :, mine], k[:, :, mine], v[:, :, mine])
    return torch.equal(out, whole[:, :, mine])


def test_ulysses_has_the_bits_of_one_process(ranks):
    assert ranks(4, out_by_heads).results == [True] * 4


@given(st.permutations(range(5)), st.floats(-800, 800))
def test_blocks_merge_in_any_order_at_any_scale(order, shift):
    q, k, v = torch.linspace(-3, 5, 60, dtype=torch.float64).sin().view(3, 1, 1, 20, 1)
    k = k + shift
    never = torch.tensor(False)
    blocks = [attend(q, k[:, :, i::5], v[:, :, i::5], never) for i in order]
    out, lse = blocks[0]
    for block in blocks[1:]:
        out, lse = merge(out, lse, *block)
    weights = (q @ k.mT).softmax(-1)
    torch.testing.assert_close(out, weights @ v, rtol=0, atol=1e-9)


def test_a_block_that_is_all_mask_changes_nothing():
    q, k, v = torch.randn(3, 1, 2, 4, 3, dtype=torch.float64)
    first = attend(q, k, v, torch.tensor(False))
    for found, wanted in zip(
        merge(*first, *attend(q, v, k, torch.tensor(True))), first, strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def too_few_heads(rank, world_size):
    others.ulysses(*torch.randn(3, 1, 2, 4, 2))


def too_few_chunks(rank, world_size):
    ring.RingAttention.apply(*torch.randn(3, 1, 4, 3, 2), zigzag)


def uneven_length(rank, world_size):
    loss_and_gradients(rank, world_size, deal=contiguous, deal_places=contiguous)


@pytest.mark.parametrize(
    "worker, says",
    [
        (too_few_heads, "2 heads and 2 of keys do not divide among 3 ranks"),
        (uneven_length, "32 tokens does not divide into 3 equal chunks: pad it to 33 tokens"),
        (too_few_chunks, "9 tokens does not divide into 6 equal chunks: pad it to 12 tokens"),
    ],
)
def test_what_does_not_divide_is_refused_by_all_before_anything_is_sent(ranks, worker, says):
    with pytest.raises(RankFailed, match="ranks 0, 1 and 2 raised ValueError") as failed:
        ranks(3, worker, trace=True)
    assert says in " ".join(str(failed.value).split())
    assert not [e for e in failed.value.report.events if e.sends or e.kind == "collective"]


@given(st.integers(1, 9), st.integers(1, 6), st.sampled_from(list(DEALS)))
def test_every_token_is_dealt_once_and_each_rank_gets_as_many(world_size, each, name):
    length = 2 * world_size * each
    dealt = [DEALS[name](length, rank, world_size).tolist() for rank in range(world_size)]
    assert sorted(sum(dealt, [])) == list(range(length))
    assert {len(places) for places in dealt} == {2 * each}
    if name == "zigzag":
        assert len({sum(places) for places in dealt}) == 1


@pytest.mark.slow
def test_what_is_sent_is_what_the_formula_says():
    for name, n, kv_heads, formula, forward, backward in figures.sent().rows:
        u, g = 64 * 32 // n, 8 // kv_heads
        by_hand = {
            "ring": (2 * (n - 1) * u // g, (4 * n - 2) * u // g),
            "all-gather": (2 * (n - 1) * u // g, 2 * (n - 1) * u // g),
            "ulysses": ((2 * g + 2) * u * (n - 1) // (n * g),) * 2,
        }[name]
        assert (formula, forward, backward) == (by_hand[0], *by_hand)


@pytest.mark.slow
def test_backward_keeps_no_block():
    kept = {(name, n): text for name, n, _, text in figures.kept().rows}
    assert kept["RingAttention", 4] == "130 KiB"  # 4 x 32 KiB, and 4 bytes for 512 rows
    assert kept["ring_attention", 4].endswith("MiB")


def imported_by_name(rank, world_size):
    attend_by_name = others.functional.scaled_dot_product_attention

    class Named:
        scaled_dot_product_attention = staticmethod(attend_by_name)

    others.functional = Named  # in this rank only
    return others.by_context_parallel(rank, world_size)


def test_pytorch_s_is_one_process_unless_its_attention_was_imported_by_name(ranks):
    assert max(ranks(4, others.by_context_parallel, device="cpu").results) < 1e-13
    assert min(ranks(4, imported_by_name, device="cpu").results) > 0.1
