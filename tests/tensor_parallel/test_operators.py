"""Operators, layers, vocabulary: as plain tensors of all ranks give it."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as some
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab import span
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.tensor_parallel.layers import (
    ColumnParallelLinear,
    Piece,
    RowParallelLinear,
    joined,
    piece_of,
    whole_of,
)
from mgpu_tutorial.tensor_parallel.operators import (
    CopyToRanks,
    GatherSequence,
    ScatterSequence,
    SumOverRanks,
)
from mgpu_tutorial.tensor_parallel.training import flat_cross_entropy
from mgpu_tutorial.tensor_parallel.vocabulary import (
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    parallel_cross_entropy,
)


def draw(seed, *shape):
    """Whole numbers as float64: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).double()


# Operators: activations are (batch 2, sequence 3 or 3 for each rank, features 5)


def apply(rank, world_size, operator, length, length_after):
    """Forward and backward of drawn activations; the output and the input's gradient."""
    mine = draw(rank, 2, length, 5).requires_grad_()
    result = operator.apply(mine, None)
    # as it comes from a transposition: not contiguous
    gradient = draw(100 + rank, 5, length_after, 2).transpose(0, 2)
    kept = gradient.clone()
    result.backward(gradient)
    assert torch.equal(mine, draw(rank, 2, length, 5)) and torch.equal(gradient, kept)
    return result.detach(), mine.grad


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "operator", [CopyToRanks, SumOverRanks, GatherSequence, ScatterSequence]
)
def test_an_operator_and_its_backward(ranks, world_size, operator):
    whole = 3 * world_size
    length = 3 if operator is GatherSequence else whole
    after = 3 if operator is ScatterSequence else whole
    inputs = [draw(r, 2, length, 5) for r in range(world_size)]
    gradients = [draw(100 + r, 5, after, 2).transpose(0, 2) for r in range(world_size)]
    report = ranks(world_size, apply, operator, length, after)
    for rank, found in enumerate(report.results):
        here = slice(3 * rank, 3 * rank + 3)
        expected = {
            CopyToRanks: (inputs[rank], sum(gradients)),
            SumOverRanks: (sum(inputs), gradients[rank]),
            GatherSequence: (torch.cat(inputs, 1), sum(gradients)[:, here]),
            ScatterSequence: (sum(inputs)[:, here], torch.cat(gradients, 1)),
        }
        assert largest_difference(found, expected[operator]) == 0


# Layers


@given(length=some.integers(1, 9), ranks=some.integers(1, 5), dim=some.integers(0, 1))
def test_pieces_are_equal_and_make_the_whole(length, ranks, dim):
    whole = nn.Parameter(draw(0, *[(length, 2), (2, length)][dim]), length != 1)
    pieces = []
    for rank in range(ranks):
        with patch.multiple(
            dist, get_world_size=lambda _: ranks, get_rank=lambda _, r=rank: r
        ):
            pieces.append(piece_of(whole, dim, None, padded=True))
            if length % ranks:
                with pytest.raises(ValueError, match=f"{length} features cannot be cut into"):
                    piece_of(whole, dim, None)
            else:
                assert torch.equal(piece_of(whole, dim, None), pieces[-1])
    assert {piece.shape[dim] for piece in pieces} == {-(-length // ranks)}
    assert all(piece.requires_grad == whole.requires_grad for piece in pieces)
    assert all(piece.untyped_storage().nbytes() == piece.nbytes for piece in pieces)
    joined_up = torch.cat(pieces, dim)
    assert torch.equal(joined_up.narrow(dim, 0, length), whole)
    assert not joined_up.narrow(dim, length, joined_up.shape[dim] - length).any()


def two_layers(bias):
    """Linear layers from 3 to 24 to 5 features, in whole numbers."""
    layers = nn.Linear(3, 24, bias=bias), nn.Linear(24, 5, bias=bias)
    for layer in layers:
        for p in layer.parameters():
            p.data = draw(p.numel(), *p.shape)
    return layers


def run_layers(up, down):
    """Output and input's gradient of both layers with a square between them."""
    x = draw(1, 2, 4, 3).requires_grad_()
    result = down(up(x).square())
    result.backward(draw(2, 2, 4, 5))
    return result.detach(), x.grad


def cut_layers(rank, world_size, bias):
    """Output and gradient, then value and gradient of each parameter, put together."""
    up, down = two_layers(bias)
    columns, rows = ColumnParallelLinear(up), RowParallelLinear(down)
    found = [run_layers(columns, rows)]
    for p in (*columns.parameters(), *rows.parameters()):
        found.append((whole_of(p), joined(p.grad, p) if isinstance(p, Piece) else p.grad))
    return found


@pytest.mark.parametrize(("world_size", "bias"), [(1, True), (2, False), (3, True)])
def test_layers_in_pieces_are_the_whole_layers(ranks, world_size, bias):
    up, down = two_layers(bias)
    expected = [run_layers(up, down)]
    expected += [(p, p.grad) for p in (*up.parameters(), *down.parameters())]
    report = ranks(world_size, cut_layers, bias)
    assert largest_difference(report.results, [expected] * world_size) == 0


# Vocabulary


def look_up_and_predict(rank, world_size, vocabulary, scale):
    """The loss, the gradients of embedding and head put together, and the head's values."""
    embedding, head, tokens = vocabulary_of(vocabulary, scale)
    ours = VocabularyParallelEmbedding(embedding), VocabularyParallelHead(head)
    logits = ours[1](ours[0](tokens))
    assert logits.shape == (2, vocabulary, -(-vocabulary // world_size))
    with span("loss"):
        loss = parallel_cross_entropy(logits, tokens.flip(1), vocabulary)
    loss.backward()
    gradients = [joined(one.weight.grad, one.weight) for one in ours]
    return loss.detach(), *gradients, whole_of(ours[1].weight)


def vocabulary_of(vocabulary, scale):
    """An embedding and a head of 4 features, and a batch with every token twice."""
    torch.manual_seed(0)
    embedding = nn.Embedding(vocabulary, 4).double()
    head = nn.Linear(4, vocabulary, bias=False).double()
    head.weight.data *= scale
    return embedding, head, torch.arange(vocabulary).repeat(2).view(2, -1)


@pytest.mark.parametrize(
    ("world_size", "vocabulary", "scale", "limit"),
    [
        *((ranks, 61, 1, 1e-12) for ranks in (1, 2, 3, 4)),
        (4, 5, 1, 1e-12),  # the last rank has nothing but padding
        (4, 9, 1e4, 1e-8),  # logits of ten thousand, of which exp() would overflow
    ],
)
def test_embedding_head_and_loss_in_pieces(ranks, world_size, vocabulary, scale, limit):
    embedding, head, tokens = vocabulary_of(vocabulary, scale)
    logits = head(embedding(tokens))
    loss = cross_entropy(logits.flatten(0, 1), tokens.flip(1).flatten())
    loss.backward()
    expected = loss, embedding.weight.grad, head.weight.grad, head.weight
    report = ranks(world_size, look_up_and_predict, vocabulary, scale, trace=True)
    assert largest_difference(report.results, [expected] * world_size) < limit
    sent = [(e.op, e.nbytes) for e in events_of(report, "loss") if e.rank == 0]
    assert sent == [("all_reduce", 2 * vocabulary * 8)] * 3  # three numbers per token


def lose_in(rank, world_size, logits):
    """The loss of logits of which each rank has a piece, and their gradient."""
    mine = logits.chunk(world_size, -1)[rank].clone().requires_grad_()
    loss = parallel_cross_entropy(mine, torch.arange(14).view(2, 7) % 12, 12)
    loss.backward()
    return loss.detach(), mine.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_is_computed_in_float32_at_least(ranks, dtype):
    torch.manual_seed(0)
    short = (5 * torch.randn(2, 7, 12)).to(dtype)
    logits, targets = short.float().requires_grad_(), torch.arange(14) % 12
    expected = cross_entropy(logits.flatten(0, 1), targets)
    expected.backward()
    assert flat_cross_entropy(short, targets).item() == expected.item()
    for rank, (loss, gradient) in enumerate(ranks(3, lose_in, short).results):
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        share = logits.grad.chunk(3, -1)[rank]
        torch.testing.assert_close(gradient, share.to(dtype))
