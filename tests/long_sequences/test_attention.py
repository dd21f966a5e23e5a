"""Each way to share a sequence gives one process's attention, or refuses on all ranks."""

from functools import cache

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.long_sequences import figures, others, ring
from mgpu_tutorial.long_sequences.block import loss_and_gradients
from mgpu_tutorial.long_sequences.ring import contiguous, striped, zigzag


@cache
def whole(kv_heads):
    """Inputs of 24 tokens with their gradients, and the output of one process."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 24, 6, dtype=torch.float64)
    k, v = torch.randn(2, 2, kv_heads, 24, 6, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    (out * torch.arange(6)).square().sum().backward()
    return inputs, out


def distances(rank, world_size):
    """How far output and gradients of this rank's tokens are from these, by way and heads."""
    ways = [(figures.METHODS["ulysses"], contiguous)] if 4 % world_size == 0 else []
    for attention in figures.METHODS["ring"], figures.METHODS["all-gather"]:
        ways += [(attention, deal) for deal in (contiguous, zigzag, striped)]
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
            if attention is figures.METHODS["ulysses"]:
                assert torch.equal(out, right[0])  # nothing is merged
    return far


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_way_is_one_process(ranks, world_size):
    for far in ranks(world_size, distances).results:
        assert len(far) == (18 if world_size == 3 else 21)
        assert {way: d for way, d in far.items() if d > 1e-12} == {}


def too_few_heads(rank, world_size):
    others.ulysses(*torch.randn(3, 1, 2, 4, 2))


def groups_across_ranks(rank, world_size):
    others.ulysses(torch.randn(1, 6, 4, 2), *torch.randn(2, 1, 2, 4, 2))


def too_few_chunks(rank, world_size):
    ring.RingAttention.apply(*torch.randn(3, 1, 4, 3, 2), zigzag)


def uneven_length(rank, world_size):
    loss_and_gradients(rank, world_size, deal=contiguous, deal_places=contiguous)


@pytest.mark.parametrize(
    "worker, says",
    [
        (too_few_heads, "2 heads and 2 of keys do not divide among 3 ranks"),
        (groups_across_ranks, "6 heads and 2 of keys do not divide among 3 ranks"),
        (uneven_length, "32 tokens does not divide into 3 equal chunks: pad it to 33 tokens"),
        (too_few_chunks, "9 tokens does not divide into 6 equal chunks: pad it to 12 tokens"),
    ],
)
def test_what_does_not_divide_is_refused_by_all_before_anything_is_sent(ranks, worker, says):
    with pytest.raises(RankFailed, match="ranks 0, 1 and 2 raised ValueError") as failed:
        ranks(3, worker, trace=True)
    assert says in " ".join(str(failed.value).split())
    assert not [e for e in failed.value.report.events if e.sends or e.kind == "collective"]


def imported_by_name(rank, world_size):
    class Named:
        scaled_dot_product_attention = staticmethod(scaled_dot_product_attention)

    others.functional = Named  # in this rank only
    return others.by_context_parallel(rank, world_size)


def test_pytorch_s_does_not_reach_an_attention_that_was_imported_by_name(ranks):
    assert min(ranks(4, imported_by_name, device="cpu").results) > 0.1


def test_each_query_has_a_bar_as_long_as_its_keys_and_each_half_a_colour(monkeypatch):
    monkeypatch.setattr(figures, "Plot", lambda figure, text: figure)
    (axes,) = figures.triangles(contiguous).axes
    assert [bar.get_width() for bar in axes.patches] == list(range(1, 17))
    colours = [bar.get_facecolor() for bar in figures.two_blocks().axes[0].patches]
    assert colours == [colours[0]] * 3 + [colours[3]] * 3 and colours[0] != colours[3]
