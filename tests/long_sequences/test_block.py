"""A transformer block whose sequence is shared has one process's loss and gradients."""

import pytest
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.long_sequences import block


def whole_attention(q, k, v, deal):
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def mean_of_one(logits, following):
    return cross_entropy(logits.flatten(0, 1), following.flatten())


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_loss_and_gradients_are_those_of_one_process(ranks, world_size):
    how = {"attention": whole_attention, "mean": mean_of_one}
    ((loss, gradients),) = ranks(1, block.loss_and_gradients, **how).results
    for found, its_gradients in ranks(world_size, block.loss_and_gradients).results:
        assert abs(found - loss) < 1e-13
        assert largest_difference(its_gradients, gradients) < 1e-13


def test_rope_turns_by_the_distance_of_two_tokens():
    q, k = torch.randn(2, 1, 6, dtype=torch.float64)

    def score(*places):
        turned = map(block.rotate, (q, k), torch.tensor(places).split(1))
        return torch.mul(*turned).sum()

    torch.testing.assert_close(score(7, 3), score(24, 20), rtol=0, atol=1e-5)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3
