"""Vocabulary, sequence and PyTorch's plan: as one process gives it; mistakes as told."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.tensor_parallel.block import parallelize
from mgpu_tutorial.tensor_parallel.figures import steps
from mgpu_tutorial.tensor_parallel_in_practice import figures, vocabulary
from mgpu_tutorial.tensor_parallel_in_practice.sequence import (
    GatherSequence,
    ScatterSequence,
    cut_sequence,
    sum_copies,
)
from tests.tensor_parallel.test_layers import draw


def apply(rank, world_size, operator, length, length_after):
    """Forward and backward of drawn activations; the output and the input's gradient."""
    mine = draw(rank, 2, length, 5).requires_grad_()
    result = operator.apply(mine)
    # as it comes from a transposition: not contiguous
    result.backward(draw(100 + rank, 5, length_after, 2).transpose(0, 2))
    return result.detach(), mine.grad


@pytest.mark.parametrize("world_size", [1, 3])
def test_gather_and_scatter_are_each_the_backward_of_the_other(ranks, world_size):
    whole = 3 * world_size
    shares = [draw(r, 2, 3, 5) for r in range(world_size)]
    sums = sum(draw(100 + r, 5, whole, 2).transpose(0, 2) for r in range(world_size))
    for rank, found in enumerate(ranks(world_size, apply, GatherSequence, 3, whole).results):
        expected = torch.cat(shares, 1), sums[:, 3 * rank : 3 * rank + 3]
        assert largest_difference(found, expected) == 0
    total = sum(draw(r, 2, whole, 5) for r in range(world_size))
    gradients = [draw(100 + r, 5, 3, 2).transpose(0, 2) for r in range(world_size)]
    for rank, found in enumerate(ranks(world_size, apply, ScatterSequence, whole, 3).results):
        expected = total[:, 3 * rank : 3 * rank + 3], torch.cat(gradients, 1)
        assert largest_difference(found, expected) == 0


# A whole model


def alone():
    """Loss and gradients of one process, with PyTorch's loss."""
    model, generator = vocabulary.new_model(), torch.Generator().manual_seed(0)
    numbers = torch.randint(61, (4, 13), generator=generator)
    loss = cross_entropy(model(numbers[:, :-1]).flatten(0, 1), numbers[:, 1:].flatten())
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def whole_tokens(model, group=None):
    return parallelize(model, vocabulary.PLAN, group)


def in_slices(model, group=None):
    return sum_copies(cut_sequence(whole_tokens(model, group), group), group)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("prepare", [whole_tokens, in_slices])
def test_gradients_are_those_of_one_process(ranks, world_size, prepare):
    make = vocabulary.new_model, vocabulary.gradients_of
    for [found] in ranks(world_size, steps, [prepare], *make).results:
        assert largest_difference(found[:2], alone()) < 1e-14 and found[2] == []


def step_in_pairs(rank, world_size, prepare):
    """Of four ranks the first two are a group, and the last two, with other parameters."""
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).get_group("tp")

    def new():
        model = vocabulary.new_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1 + rank // 2
        return model

    cut, backward = (
        partial(prepare, group=group),
        partial(vocabulary.gradients_of, group=group),
    )
    return steps(rank, world_size, [cut], new, backward)[0][:2]


@pytest.mark.parametrize("prepare", [whole_tokens, in_slices])
def test_groups_work_side_by_side(ranks, prepare):
    results = ranks(4, step_in_pairs, prepare).results
    for rank, found in enumerate(results):
        assert (largest_difference(found, alone()) < 1e-14) == (rank < 2)
    assert largest_difference(results[2], results[3]) == 0


@pytest.mark.slow
def test_another_order_is_the_same_function(ranks):
    found = ranks(2, figures.orders, tokens=61).results[0]["float64"]
    assert max(found["right"]) < 1e-14 < min(found["without mask"])
    assert len(set(found["right"])) > 1


# Vocabulary: a last rank with nothing but padding, short numbers, no token at all


def look_up_and_predict(rank, world_size, tokens):
    model = whole_tokens(vocabulary.new_model(vocabulary=tokens, depth=1))
    numbers = torch.arange(tokens).repeat(2).view(2, -1)
    vocabulary.parallel_cross_entropy(model(numbers), numbers.flip(1)).backward()
    return [layer.weight.grad for layer in (model.token, model.head)]


@pytest.mark.parametrize("tokens", [5, 8])
def test_padding_has_no_gradient(ranks, tokens):
    model = vocabulary.new_model(vocabulary=tokens, depth=1)
    numbers = torch.arange(tokens).repeat(2).view(2, -1)
    cross_entropy(model(numbers).flatten(0, 1), numbers.flip(1).flatten()).backward()
    results = ranks(4, look_up_and_predict, tokens).results
    for place, layer in enumerate((model.token, model.head)):
        found = torch.cat([result[place] for result in results])
        assert largest_difference(found[:tokens], layer.weight.grad) < 1e-14
        assert not found[tokens:].any()


def lose_in(rank, world_size, logits):
    mine = logits.chunk(world_size, -1)[rank].clone().requires_grad_()
    loss = vocabulary.parallel_cross_entropy(mine, torch.arange(14).view(2, 7) % 12)
    loss.backward()
    return loss.detach(), mine.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_is_computed_in_float32_at_least(ranks, dtype):
    torch.manual_seed(0)
    short = (5 * torch.randn(2, 7, 12)).to(dtype)
    logits, targets = short.float().requires_grad_(), torch.arange(14) % 12
    expected = cross_entropy(logits.flatten(0, 1), targets)
    expected.backward()
    for rank, (loss, gradient) in enumerate(ranks(3, lose_in, short).results):
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        torch.testing.assert_close(gradient, logits.grad.chunk(3, -1)[rank].to(dtype))
