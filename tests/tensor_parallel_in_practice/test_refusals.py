"""A token unknown to all is refused; a cut vocabulary or sequence is as one process."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.tensor_parallel.block import parallelize, whole_of
from mgpu_tutorial.tensor_parallel_in_practice import sequence, vocabulary
from mgpu_tutorial.tensor_parallel_in_practice.vocabulary import (
    PLAN,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    new_model,
    parallel_cross_entropy,
)


def look_up(rank, world_size, *tokens):
    VocabularyParallelEmbedding(nn.Embedding(61, 4))(torch.tensor([[0, *tokens]]))


def lose(rank, world_size, target):
    targets = torch.zeros(2, 3, dtype=torch.int64)
    targets[-1, -1] = target
    return parallel_cross_entropy(torch.zeros(2, 3, 4), targets).item()


def thaw(rank, world_size):
    """The norm is frozen while its hook is made, and trained later."""
    model, one = parallelize(new_model(), PLAN), new_model()
    model.norm.requires_grad_(False)
    sequence.sum_copies(sequence.cut_sequence(model))
    assert not model.norm.weight.requires_grad
    model.norm.requires_grad_(True)
    vocabulary.gradients_of(model)
    tokens, targets = vocabulary.new_batch()
    cross_entropy(one(tokens).flatten(0, 1), targets.flatten()).backward()
    return largest_difference(model.norm.weight.grad, one.norm.weight.grad)


def test_a_copy_that_is_trained_later_is_summed_too(ranks):
    assert max(ranks(2, thaw).results) < 1e-14


def slice_thirteen(rank, world_size):
    sequence.scattered_sum(torch.zeros(2, 13, 4))


@pytest.mark.parametrize(
    "error, worker, given",
    [
        (IndexError("token 61", "61"), look_up, (61,)),
        (IndexError("token -1", "61"), look_up, (-1,)),
        (IndexError("token 999", "61"), look_up, (1, 999)),
        (IndexError("target 8", "8"), lose, (8,)),
        (IndexError("target 99", "8"), lose, (99,)),
        (IndexError("target -1", "8"), lose, (-1,)),
        (ValueError("13 tokens"), slice_thirteen, ()),
    ],
)
def test_it_is_refused_on_every_rank(refused, error, worker, given):
    refused(2, error, worker, *given)


def loss_and_gradient(rank, world_size, logits, targets):
    part = logits.chunk(world_size, -1)[rank].clone().requires_grad_()
    loss = parallel_cross_entropy(part, targets)
    loss.backward()
    return loss.detach(), part.grad


LOGITS = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "targets",
    [[[0, -100, 5], [-100, 2, 3]], [[1, 2, 3], [-100, -100, -100]], [[-100, -100, 4]] * 2],
)
def test_minus_100_is_left_out_of_the_mean(ranks, count, targets):
    targets, whole = torch.tensor(targets), LOGITS.clone().requires_grad_()
    expected = cross_entropy(whole.flatten(0, 1), targets.flatten())
    expected.backward()
    results = ranks(count, loss_and_gradient, LOGITS, targets).results
    for loss, _ in results:
        torch.testing.assert_close(loss, expected.detach())
    found = torch.cat([gradient for _, gradient in results], -1)
    torch.testing.assert_close(found, whole.grad)


def test_no_target_at_all_is_nan_as_in_one_process(ranks):
    none = torch.full((2, 3), -100)
    [(loss, _)] = ranks(1, loss_and_gradient, LOGITS, none).results
    assert loss.isnan() and cross_entropy(LOGITS.flatten(0, 1), none.flatten()).isnan()


def in_layers(rank, world_size, rows, dtype, padding, frozen):
    """An embedding and a head with a bias, of the whole vocabulary and of parts of it."""
    torch.manual_seed(0)
    embedding = nn.Embedding(rows, 4, padding_idx=padding, dtype=dtype)
    head = nn.Linear(4, rows, dtype=dtype)
    if frozen:
        embedding.requires_grad_(False)
        head.bias.requires_grad_(False)
    pair = (
        VocabularyParallelEmbedding(deepcopy(embedding)),
        VocabularyParallelHead(deepcopy(head)),
    )
    tokens = torch.arange(2 * rows).view(2, rows) % rows
    for _ in range(2):  # gradients add up
        loss = parallel_cross_entropy(pair[1](pair[0](tokens)), tokens)
        logits = head(embedding(tokens)).to(torch.promote_types(dtype, torch.float32))
        expected = cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        expected.backward()
    far = [(loss - expected).abs().item()]
    for part, whole in zip(pair, (embedding, head), strict=True):
        for name, parameter in part.named_parameters():
            one = whole.get_parameter(name)
            assert parameter.requires_grad == one.requires_grad and parameter.dtype == dtype
            if one.requires_grad:
                gradient = whole_of(parameter.grad, parameter)
                assert not gradient[rows:].any()
                far.append(largest_difference(gradient[:rows].double(), one.grad.double()))
    return max(far)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "count, rows, dtype, padding",
    [(1, 6, torch.float64, 2), (3, 6, torch.float64, 0), (3, 7, torch.float64, -1)]
    + [(4, 5, torch.float64, None), (3, 2, torch.float64, 1), (2, 6, torch.bfloat16, 3)],
)
def test_layers_of_a_vocabulary_are_the_whole_ones(
    ranks, count, rows, dtype, padding, frozen
):
    far = max(ranks(count, in_layers, rows, dtype, padding, frozen).results)
    assert far < (1e-14 if dtype == torch.float64 else 2e-2)


def no_tokens(rank, world_size):
    none = torch.zeros(2, 0, dtype=torch.int64)
    return VocabularyParallelEmbedding(nn.Embedding(6, 4))(none).shape


def test_no_token_is_no_row(ranks):
    assert ranks(2, no_tokens).results == [(2, 0, 4)] * 2


def accumulate(rank, world_size):
    """Two backward passes, with a frozen norm; how far gradients are from one process."""
    model, one = new_model(), new_model()
    for each in model, one:
        each.norm.requires_grad_(False)
    sequence.sum_copies(sequence.cut_sequence(parallelize(model, PLAN)))
    alone, _ = dist.new_subgroups(1)
    for _ in range(2):
        vocabulary.gradients_of(model)
        vocabulary.gradients_of(one, alone)
    far = []
    for name, parameter in model.named_parameters():
        whole = one.get_parameter(name)
        assert (parameter.grad is None) == (whole.grad is None), name
        if whole.grad is not None:
            gradient = whole_of(parameter.grad, parameter)[: len(whole)]
            far.append(largest_difference(gradient, whole.grad))
    return max(far)


def test_copies_are_summed_once_in_each_backward(ranks):
    assert max(ranks(2, accumulate).results) < 1e-14


def in_another_group(rank, world_size, call):
    groups = [dist.new_group([r]) for r in range(world_size)]
    return call(groups[1 - rank])


@pytest.mark.parametrize(
    "call",
    [
        lambda group: sequence.GatherSequence.apply(torch.ones(1, 2, 2), group),
        lambda group: sequence.ScatterSequence.apply(torch.ones(1, 2, 2), group),
    ],
)
def test_a_group_without_this_rank_is_refused(refused, call):
    """torch's calls would return at once, and leave each rank with its own part."""
    refused(2, ValueError("rank", "group"), in_another_group, call, sent=True)


def lose_traced(rank, world_size):
    parallel_cross_entropy(torch.zeros(2, 3, 4).requires_grad_(), torch.zeros(2, 3).long())


def test_a_loss_sends_three_numbers_a_position_and_no_more(ranks):
    report = ranks(2, lose_traced, trace=True)
    calls = [(e.op, e.nbytes) for e in report.events if e.rank == 0]
    assert calls == [("all_reduce", 6 * 4)] * 3
