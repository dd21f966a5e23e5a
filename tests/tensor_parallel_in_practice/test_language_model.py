"""A whole model with its vocabulary and its sequence cut: as one process gives it."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.tensor_parallel.block import parallelize, whole_of
from mgpu_tutorial.tensor_parallel_in_practice import figures, vocabulary
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
    numbers = torch.randint(tokens, (4, 13), generator=torch.Generator().manual_seed(0))
    return model, numbers[:, :-1], numbers[:, 1:]


def alone(*which):
    """Loss and gradients of one process, with PyTorch's loss."""
    model, tokens, targets = scaled_model(*which)
    loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss, [p.grad for p in model.parameters()]


def step(rank, world_size, size, tokens, cut):
    """The same in groups of `size` ranks; the second group's model has other numbers."""
    group, _ = dist.new_subgroups(size)
    model, tokens, targets = scaled_model(tokens, 1 + rank // size)
    model = cut(model, group)
    loss = vocabulary.parallel_cross_entropy(model(tokens), targets, group)
    loss.backward()
    return loss.detach(), [whole_of(p.grad, p) for p in model.parameters()]


@pytest.mark.parametrize("cut", [whole_tokens, in_slices])
@pytest.mark.parametrize("world_size, size, tokens", [(3, 3, 61), (4, 2, 8), (4, 4, 5)])
def test_a_step_is_that_of_one_process(ranks, world_size, size, tokens, cut):
    for rank, found in enumerate(ranks(world_size, step, size, tokens, cut).results):
        loss, gradients = alone(tokens, 1 + rank // size)
        assert largest_difference(found[0], loss.detach()) < 1e-14
        for gradient, expected in zip(found[1], gradients, strict=True):
            assert largest_difference(gradient[: len(expected)], expected) < 1e-14
            assert not gradient[len(expected) :].any()  # that of the padding


@pytest.mark.slow
def test_another_order_is_the_same_function(ranks):
    found = ranks(2, figures.orders, tokens=61).results[0]["float64"]
    assert max(found["right"]) < 1e-14 < min(found["without mask"])
    assert len(set(found["right"])) > 1


def lose(rank, world_size, logits):
    logits = logits.clone().requires_grad_()
    loss = vocabulary.parallel_cross_entropy(logits, torch.arange(14))
    loss.backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_is_computed_in_float32_at_least(ranks, dtype):
    short = (5 * torch.randn(14, 20)).to(dtype)
    [(loss, gradient)] = ranks(1, lose, short).results
    logits = short.float().requires_grad_()
    expected = cross_entropy(logits, torch.arange(14))
    expected.backward()
    torch.testing.assert_close((loss, gradient), (expected.detach(), logits.grad.to(dtype)))
