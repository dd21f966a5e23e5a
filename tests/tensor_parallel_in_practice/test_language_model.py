"""A whole model with its vocabulary and its sequence cut: as one process gives it."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.tensor_parallel.block import parallelize, whole_of
from mgpu_tutorial.tensor_parallel_in_practice import vocabulary
from mgpu_tutorial.tensor_parallel_in_practice.sequence import cut_sequence, sum_copies


def whole_tokens(model, group):
    return parallelize(model, vocabulary.PLAN, group)


def in_slices(model, group):
    return sum_copies(cut_sequence(whole_tokens(model, group), group), group)


def scaled_model(tokens, scale):
    model = vocabulary.new_model(vocabulary=tokens)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= scale
    return model


def distance(rank, world_size, size, vocabulary_size, cut):
    """How far a step in groups, whose models differ, is from one process."""
    group, _ = dist.new_subgroups(size)
    one = scaled_model(vocabulary_size, 1 + rank // size)
    model = cut(scaled_model(vocabulary_size, 1 + rank // size), group)
    torch.manual_seed(0)
    tokens, targets = torch.randint(vocabulary_size, (2, 4, 12))
    expected = cross_entropy(one(tokens).flatten(0, 1), targets.flatten())
    loss = vocabulary.parallel_cross_entropy(model(tokens), targets, group)
    expected.backward()
    loss.backward()
    far = [largest_difference(loss.detach(), expected.detach())]
    for p, whole in zip(model.parameters(), one.parameters(), strict=True):
        gradient = whole_of(p.grad, p)
        right = torch.zeros_like(gradient)  # as it is for the padding
        right[: len(whole)] = whole.grad
        far.append(largest_difference(gradient, right))
    return max(far)


@pytest.mark.parametrize("cut", [whole_tokens, in_slices])
@pytest.mark.parametrize("world_size, size, tokens", [(3, 3, 61), (4, 2, 8), (4, 4, 5)])
def test_a_step_is_that_of_one_process(ranks, world_size, size, tokens, cut):
    assert max(ranks(world_size, distance, size, tokens, cut).results) < 1e-14


def lose(rank, world_size, logits):
    logits = logits.clone().requires_grad_()
    loss = vocabulary.parallel_cross_entropy(logits, torch.arange(14))
    loss.backward()
    return loss.detach(), logits.grad


def test_the_loss_is_computed_in_float32_at_least(ranks):
    short = (5 * torch.randn(14, 20)).bfloat16()
    [(loss, gradient)] = ranks(1, lose, short).results
    logits = short.float().requires_grad_()
    expected = cross_entropy(logits, torch.arange(14))
    expected.backward()
    torch.testing.assert_close((loss, gradient), (expected.detach(), logits.grad.bfloat16()))
