"""A transformer block whose sequence is shared has one process's loss and gradients."""

import pytest
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.long_sequences import block
from mgpu_tutorial.long_sequences.ring import contiguous


@pytest.fixture(scope="module")
def one():
    """The loss and the gradients of one process, with PyTorch's attention."""

    def attention(q, k, v, deal):
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    tokens, following = block.text()
    assert 0 < (following == -100).sum() < following.numel()
    model = block.new_model(torch.arange(tokens.shape[1]), attention, None)
    loss = cross_entropy(model(tokens).flatten(0, 1), following.flatten())
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_loss_and_gradients_are_those_of_one_process(ranks, one, world_size):
    for loss, gradients in ranks(world_size, block.loss_and_gradients).results:
        assert abs(loss - one[0]) < 1e-13
        assert largest_difference(gradients, one[1]) < 1e-13


def dealt_otherwise(rank, world_size):
    """The gradients where one of the three is dealt in another way."""
    ways = {what: {what: contiguous} for what in ("deal", "deal_places", "deal_following")}
    return {
        w: block.loss_and_gradients(rank, world_size, **way)[1] for w, way in ways.items()
    }


def test_what_is_dealt_in_another_way_gives_other_gradients(ranks, one):
    for gradients in ranks(4, dealt_otherwise).results[0].values():
        assert largest_difference(gradients, one[1]) > 1e-3


def test_rope_turns_by_the_distance_of_two_tokens():
    q, k = torch.randn(2, 1, 6, dtype=torch.float64)

    def score(*places):
        turned = map(block.rotate, (q, k), torch.tensor(places).split(1))
        return torch.mul(*turned).sum()

    torch.testing.assert_close(score(7, 3), score(24, 20), rtol=0, atol=1e-5)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3
