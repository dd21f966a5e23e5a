"""What cannot be shared out is refused on every rank; what is unusual comes out right."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from mgpu_tutorial.long_sequences import block, others, ring
from mgpu_tutorial.long_sequences.ring import contiguous, striped, zigzag


def attend(rank, world_size, way, shapes, dtype=torch.float32):
    q, k, v = (torch.ones(shape, dtype=dtype) for shape in shapes)
    return others.METHODS[way](q, k, v, contiguous)


def shapes(heads, kv_heads, tokens=4, keys=4):
    return (1, heads, tokens, 2), *[(1, kv_heads, keys, 2)] * 2


ALIKE = "alike in all but the heads of q"


@pytest.mark.parametrize("way", ["ring", "all-gather", "ulysses"])
@pytest.mark.parametrize(
    "words, given",
    [
        ("1 heads of queries cannot share 4 of keys", shapes(1, 4)),
        ("3 heads of queries cannot share 2 of keys", shapes(3, 2)),
        ("6 heads of queries cannot share 4 of keys", shapes(6, 4)),
        (ALIKE, shapes(2, 2, keys=3)),
        (ALIKE, [*shapes(2, 2)[:2], (1, 2, 4, 3)]),
        (ALIKE, [shape[1:] for shape in shapes(2, 2)]),
    ],
)
def test_shapes_that_do_not_fit_are_refused(refused, way, words, given):
    refused(2, words, attend, way, given)


@pytest.mark.parametrize("way", ["ring", "all-gather", "ulysses"])
def test_whole_numbers_are_no_queries(refused, way):
    refused(2, "expected one float dtype", attend, way, shapes(2, 2), torch.int64)


def deal_alike(rank, world_size, deal):
    return others.ulysses(*(torch.ones(1, 2, 4, 2) for _ in "qkv"), deal=deal)


@pytest.mark.parametrize("deal", [zigzag, striped])
def test_ulysses_refuses_tokens_that_are_no_neighbours(refused, deal):
    """Its causal mask counts the joined tokens from 0, in whatever order they lie."""
    words = "Ulysses joins the ranks' tokens in order"
    refused(2, words, deal_alike, deal, sent=True)


def deal_otherwise(rank, world_size, way, what):
    """Rank 1 deals in another way, or has keys of another shape or dtype."""
    deal = striped if rank and what == "deal" else contiguous
    heads = 1 if rank and what == "heads" else 2
    dtype = torch.float64 if rank and what == "dtype" else torch.float32
    q, k, v = (torch.ones(1, n, 4, 2, dtype=dtype) for n in (2, heads, heads))
    return others.METHODS[way](q, k, v, deal)


@pytest.mark.parametrize("way", ["ring", "all-gather", "ulysses"])
@pytest.mark.parametrize(
    "what, words",
    [
        ("deal", "positions: [[0, 1, 2, 3], [4, 5, 6, 7]] on rank 0 and [[0, 2, 4, 6], "),
        ("heads", "keys: torch.Size([1, 2, 4, 2]) on rank 0 and torch.Size([1, 1, 4, 2])"),
        ("dtype", "dtype: torch.float32 on rank 0 and torch.float64 on rank 1, but all"),
    ],
)
def test_ranks_that_deal_otherwise_are_refused(refused, way, what, words):
    """A wrong mask looks like any other, and gloo moves bytes of whatever dtype."""
    refused(2, words, deal_otherwise, way, what, sent=True)


def forget_the_rank(length, rank, world_size):
    return torch.arange(length // world_size)


def forget_some(length, rank, world_size):
    return torch.arange(length)[rank : rank + 2]


def deal_wrongly(rank, world_size, way, deal):
    return others.METHODS[way](*(torch.ones(1, 2, 4, 2) for _ in "qkv"), deal)


@pytest.mark.parametrize("way", ["ring", "all-gather", "ulysses"])
@pytest.mark.parametrize("deal", [forget_the_rank, forget_some])
def test_a_deal_that_is_no_partition_is_refused(refused, way, deal):
    refused(
        2, "it must give each position of the sequence to one rank", deal_wrongly, way, deal
    )


def deal_otherwise_later(rank, world_size, way):
    """Both deals are known to both ranks when one takes the first, the other the second."""
    qkv = [torch.ones(1, 2, 4, 2) for _ in "qkv"]
    for deal in contiguous, striped, (striped if rank else contiguous):
        result = others.METHODS[way](*qkv, deal)
    return result


@pytest.mark.parametrize("way", ["ring", "all-gather"])
def test_ranks_that_deal_otherwise_later_are_refused(refused, way):
    words = "positions: [[0, 1, 2, 3], [4, 5, 6, 7]] on rank 0 and [[0, 2, 4, 6], "
    refused(2, words, deal_otherwise_later, way, sent=True)


def calls_of_a_ring(rank, world_size, deals):
    for deal in deals:
        ring.ring_attention(*(torch.ones(1, 2, 4, 2) for _ in "qkv"), deal)


def test_one_deal_is_asked_once(ranks):
    """The same messages at each call, and those of the question before the first."""
    once, twice, thrice = (
        len(ranks(2, calls_of_a_ring, [contiguous] * n, trace=True).events) for n in (1, 2, 3)
    )
    assert once > twice - once == thrice - twice > 0


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


def in_the_other_group(rank, world_size, way):
    groups = [dist.new_group([r]) for r in range(world_size)]
    return IN_GROUPS[way](*(torch.ones(1, 2, 4, 2) for _ in "qkv"), groups[1 - rank])


@pytest.mark.parametrize("way", IN_GROUPS)
def test_a_group_without_this_rank_is_refused(refused, way):
    refused(2, "isn't in the group that it was given", in_the_other_group, way, sent=True)


def differentiate_twice(rank, world_size, way):
    parts = [torch.ones(1, 2, 4, 2, requires_grad=True) for _ in range(3)]
    loss = others.METHODS[way](*parts, contiguous).square().sum()
    torch.autograd.grad(loss, parts, create_graph=True)


@pytest.mark.parametrize(
    "way, operator", [("ring", "RingAttention"), ("all-gather", "GatherSequence")]
)
def test_a_second_derivative_is_refused(refused, way, operator):
    words = f"a second derivative through {operator} is not computed"
    refused(2, words, differentiate_twice, way, sent=True)


def test_a_block_whose_tokens_do_not_divide_is_refused(refused):
    words = "32 tokens does not divide into 6 equal chunks"
    refused(3, words, block.loss_and_gradients)


@pytest.mark.parametrize("deal", [contiguous, zigzag, striped])
@pytest.mark.parametrize(
    "given, words",
    [
        ((8, -1, 2), "there is no rank -1 of 2"),
        ((8, 2, 2), "there is no rank 2 of 2"),
        ((8, 0, 0), "there is no rank 0 of 0"),
        ((0, 0, 2), "neither can be so few"),
        ((9, 0, 2), "9 tokens does not divide"),
    ],
)
def test_nobody_is_dealt_the_tokens_of_another(deal, given, words):
    with pytest.raises(ValueError, match=words):
        deal(*given)


@given(st.sampled_from([contiguous, zigzag, striped]), st.integers(1, 6), st.integers(1, 6))
def test_each_token_is_dealt_once_and_equally_many_to_each(deal, each, world_size):
    length = 2 * each * world_size
    dealt = [deal(length, rank, world_size).tolist() for rank in range(world_size)]
    assert {len(places) for places in dealt} == {2 * each}
    assert sorted(sum(dealt, [])) == [*range(length)]


def test_rope_needs_pairs_and_keeps_the_dtype():
    with pytest.raises(ValueError, match="5 numbers make no pairs"):
        block.rotate(torch.ones(1, 1, 2, 5), torch.arange(2))
    for dtype in torch.float16, torch.bfloat16, torch.float64:
        assert block.rotate(torch.ones(2, 4, dtype=dtype), torch.arange(2)).dtype == dtype


@pytest.mark.parametrize(
    "x, places, words",
    [
        (torch.ones(1, 1, 4, 2), torch.arange(1), "and 1 places: give fractions"),
        (torch.ones(1, 1, 4, 2), torch.arange(3), "and 3 places: give fractions"),
        (torch.ones(1, 1, 4, 2).long(), torch.arange(4), "torch.int64, and 4 places: give"),
    ],
)
def test_rope_needs_fractions_and_a_place_for_each_token(x, places, words):
    """One place would be that of all tokens, and whole numbers would be cut off."""
    with pytest.raises(ValueError, match=words):
        block.rotate(x, places)


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
