"""Tokens that do not divide are refused on every rank; what is unusual comes out right."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from mgpu_tutorial.long_sequences import block, others, ring
from mgpu_tutorial.long_sequences.ring import contiguous, striped, zigzag


def in_groups(rank, world_size, way):
    """Attention of eight tokens on ranks 0 and 2, and on 1 and 3, beside one process."""
    group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    torch.manual_seed(rank % 2)  # each group has tokens of its own
    whole = torch.randn(3, 1, 4, 8, 2, dtype=torch.float64).requires_grad_()
    mine = contiguous(8, dist.get_rank(group), 2)
    parts = [part.detach()[:, :, mine].requires_grad_() for part in whole]
    out = IN_GROUPS[way](*parts, group)
    one = scaled_dot_product_attention(*whole, is_causal=True)
    for result in out, one:
        result.square().sum().backward()
    found, right = [out, *(part.grad for part in parts)], [one, *whole.grad]
    return max((a - b[:, :, mine]).abs().max() for a, b in zip(found, right, strict=True))


IN_GROUPS = {
    "ring_attention": lambda q, k, v, g: ring.ring_attention(q, k, v, contiguous, g)[0],
    "RingAttention": lambda q, k, v, g: ring.RingAttention.apply(q, k, v, contiguous, g),
    "all-gather": lambda q, k, v, g: others.gathered_attention(q, k, v, contiguous, g),
    "ulysses": others.ulysses,
}


@pytest.mark.parametrize("way", IN_GROUPS)
def test_two_groups_are_two_worlds(ranks, way):
    assert max(ranks(4, in_groups, way).results) < 1e-12


def test_a_block_whose_tokens_do_not_divide_is_refused(refused):
    refused(3, ValueError("32 tokens", "36"), block.together, [5, 20, 7])


@pytest.mark.parametrize("deal", [contiguous, zigzag, striped])
def test_tokens_that_do_not_divide_are_refused(deal):
    with pytest.raises(ValueError, match="9 tokens"):
        deal(9, 0, 2)


def attend_to_unequal_shares(rank, world_size):
    """Five tokens and four, by a `deal` that a reader may write."""
    shares = torch.arange(9).tensor_split(2)
    ring.ring_attention(*torch.ones(3, 1, 2, len(shares[rank]), 2), lambda _, r, n: shares[r])


def test_ranks_with_unequally_many_tokens_are_refused(refused):
    """A block would not fit the tensor that receives it, and gloo would abort the rank."""
    refused(2, ValueError("[5, 4]", "deal"), attend_to_unequal_shares)


@given(st.sampled_from([contiguous, zigzag, striped]), st.integers(1, 6), st.integers(1, 6))
def test_each_token_is_dealt_once_and_equally_many_to_each(deal, each, world_size):
    length = 2 * each * world_size
    dealt = [deal(length, rank, world_size).tolist() for rank in range(world_size)]
    assert {len(places) for places in dealt} == {2 * each}
    assert sorted(sum(dealt, [])) == [*range(length)]


def distances(rank, world_size, dtype, turned):
    """How far output and gradients are from float64, by way; `sdpa` is PyTorch's own."""
    torch.manual_seed(0)
    inputs = torch.randn(3, 1, 4, 32, 8).to(dtype)
    mine, far = torch.arange(32).chunk(world_size)[rank], {}

    def tried(parts, attention):
        parts = [part.clone().requires_grad_() for part in parts]
        out = attention(*parts)
        out.square().sum().backward()
        return [out.detach(), *(part.grad for part in parts)]

    causal = lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    right = [x[:, :, mine] for x in tried(inputs.double(), causal)]
    for way, attention in others.METHODS.items():
        parts = inputs[..., mine, :]
        if turned:  # the same numbers in another order of memory
            parts = parts.transpose(2, 4).contiguous().transpose(2, 4)
        found = tried(parts, lambda *qkv, run=attention: run(*qkv, contiguous))
        assert all(x.dtype == dtype for x in found)
        far[way] = max(
            (x - y).norm() / y.norm() for x, y in zip(found, right, strict=True)
        ).item()
    found = [x[:, :, mine] for x in tried(inputs, causal)]
    far["sdpa"] = max((x - y).norm() / y.norm() for x, y in zip(found, right, strict=True))
    return far


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_in_16_bits_each_way_is_as_near_as_pytorch_s(ranks, dtype):
    for far in ranks(2, distances, dtype, False).results:
        own = far.pop("sdpa")
        assert {way: d for way, d in far.items() if d > 2 * own} == {}


def test_another_order_of_memory_changes_nothing(ranks):
    for far in ranks(2, distances, torch.float64, True).results:
        assert max(far.values()) < 1e-12


def call_a_ring(rank, world_size):
    ring.ring_attention(*torch.ones(3, 1, 2, 4, 2), contiguous)


def test_a_ring_sends_its_hops_and_no_more(ranks):
    report = ranks(4, call_a_ring, trace=True)
    assert sum(e.sends for e in report.events if e.rank == 0) == 3
    assert not [e for e in report.events if e.kind == "collective"]
