"""Documents of a sequence don't see each other, however its tokens are dealt."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial.instruments.price.models import rotated, turns_of
from mgpu_tutorial.long_sequences import others, ring
from mgpu_tutorial.long_sequences.block import one_by_one, together
from mgpu_tutorial.long_sequences.documents import packed
from mgpu_tutorial.long_sequences.ring import contiguous, striped, zigzag

LENGTHS = [5, 20, 7]


def hiding_ring(q, k, v, deal, hides):
    return ring.RingAttention.apply(q, k, v, deal, None, hides)


def hiding_ulysses(q, k, v, deal, hides):
    return others.ulysses(q, k, v, None, hides)


def moved(rank, world_size, attention, deal, changed):
    """The places whose outputs move on this rank when one token changes."""
    hides, places = packed(LENGTHS)[0], deal(32, rank, world_size)
    torch.manual_seed(0)
    x, outs = torch.randn(1, 4, 32, 4), []
    for change in 0, 1:
        x[:, :, changed] += change
        part = x[:, :, places]
        outs.append(attention(part, part, part, deal, hides))
    return places[(outs[0] != outs[1]).any(-1).any(1)[0]].tolist()


@pytest.mark.parametrize("changed, end", [(0, 5), (6, 25), (31, 32)])
@pytest.mark.parametrize(
    "attention, deal",
    [
        (hiding_ring, contiguous),
        (hiding_ring, zigzag),
        (hiding_ring, striped),
        (hiding_ulysses, contiguous),
    ],
)
def test_a_changed_token_moves_its_own_document_only(ranks, attention, deal, changed, end):
    results = ranks(4, moved, attention, deal, changed).results
    assert sorted(sum(results, [])) == [*range(changed, end)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_packed_documents_are_read_as_one_by_one(ranks, world_size):
    right = ranks(1, one_by_one, LENGTHS).results[0]
    for found in ranks(world_size, together, LENGTHS).results:
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


def test_rope_turns_by_the_distance_of_two_tokens():
    """So positions that run on change nothing in it, as the text says."""
    q, k = torch.randn(2, 1, 1, 1, 6)
    turns = turns_of(25, 6)

    def score(query, key):
        return torch.mul(rotated(q, turns[[query]]), rotated(k, turns[[key]])).sum()

    torch.testing.assert_close(score(7, 3), score(24, 20), rtol=0, atol=1e-5)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6).filter(lambda n: max(n) > 1))
def test_documents_weigh_alike_and_one_without_a_label_nothing(lengths):
    weights = packed(lengths)[2].split(lengths)
    sums = torch.stack([part.sum() for part in weights if len(part) > 1])
    torch.testing.assert_close(sums, torch.full_like(sums, 1 / len(sums)))
    assert all(part[-1] == 0 for part in weights)
