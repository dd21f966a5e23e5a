"""What an even load costs: the remedies of the page, on the page's example and on others."""

import pytest
import torch

from mgpu_tutorial.experts import balance
from mgpu_tutorial.experts.layer import Experts

REMEDIES = {}, {"factor": 1.0}, {"rate": 0.003}, {"rate": 1.0}


def test_the_auxiliary_loss_is_one_for_equal_loads_and_pushes_the_busy_down():
    scores = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    even = balance.auxiliary_loss(scores, torch.tensor([2, 2, 2]))
    assert even.item() == pytest.approx(1)
    shares = torch.tensor([0.5, 0.25, 0.25])  # all probabilities are 1/3
    loss = balance.auxiliary_loss(scores, torch.tensor([2, 1, 1]))
    (gradient,) = torch.autograd.grad(loss, scores)
    # of 3 Σ f P, softmax leaves 3 P (f - Σ f P), here f - 1/3, for each of four tokens
    assert torch.allclose(gradient, (shares - 1 / 3).double() / 4, rtol=0, atol=1e-8)
    assert gradient[0, 0] > 0 > gradient[0, 1]


def test_the_bias_moves_towards_the_mean_and_not_the_median():
    """The mean of these loads is 5, the median 3: with 4 a bias rises, with 5 it stays."""
    counts, rate = torch.tensor([1, 2, 2, 4, 5, 16]), 0.5
    moved = balance.move_bias(torch.zeros(6, dtype=torch.float64), counts, rate)
    assert moved.tolist() == [0.5, 0.5, 0.5, 0.5, 0, -0.5]


def learn_each(rank, world_size, draw):
    return balance.learn(Experts(8, k=2), **REMEDIES[rank], draw=draw)


@pytest.mark.slow
@pytest.mark.parametrize("draw, costs", [(1, (1.09, 1.0)), (11, (1.03, 0.95))])
def test_the_bias_evens_the_load_out_for_less_than_the_loss(ranks, draw, costs):
    last = [
        [sum(values[-50:]) for values in found]
        for found in ranks(4, learn_each, draw).results
    ]
    nothing, loss, bias, fast = last
    assert max(loss[0], bias[0]) < 0.5 * nothing[0] < fast[0]
    found = loss[1] / nothing[1], bias[1] / nothing[1]
    assert found == pytest.approx(costs, abs=0.006)
