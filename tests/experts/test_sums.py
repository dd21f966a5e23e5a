"""The sums that the page tells: a grouped product, messages over NICs, rounded scores."""

import math
from math import comb

import pytest
import torch


def test_a_grouped_product_is_the_loop_s():
    x, up = torch.randn(6, 16), torch.randn(3, 16, 32)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)  # 2, 0 and 4 rows
    grouped = torch.nn.functional.grouped_mm(x, up, offs=ends)
    torch.testing.assert_close(grouped, torch.cat([x[:2] @ up[0], x[2:] @ up[2]]))


NODES = 8 * (1 - comb(224, 8) / comb(256, 8))  # in the mean, of eight experts of 256


@pytest.mark.parametrize(
    "copies, nbytes, ms",
    [(8, 2 + 2, 23.5), (NODES, 2 + 2, 15.5), (4, 2 + 2, 11.7), (4, 1 + 2, 8.8)],
)
def test_what_a_layer_of_deepseek_v3_sends_over_its_cards(copies, nbytes, ms):
    """4,096 tokens of 7,168 numbers there and back; seven eighths leave the node."""
    seconds = 4096 * copies * 7168 * nbytes * 7 / 8 / 35e9
    assert 1e3 * seconds == pytest.approx(ms, abs=0.05)


def test_what_it_computes_beside_that():
    operations = 6 * 4096 * 8 * 7168 * 2048  # of eight experts of three matrices
    assert 1e3 * operations / 657e12 == pytest.approx(4.4, abs=0.05)


@pytest.mark.parametrize("score, most", [(100.25, 1.65), (1.003, 1.01)])
def test_rounding_two_scores_changes_the_ratio_of_their_weights(score, most):
    step = torch.finfo(torch.bfloat16).eps * 2 ** math.floor(math.log2(score))
    wrong = math.exp(step)  # each of two scores is off by half a step at most
    assert wrong == pytest.approx(most, abs=0.005) and wrong < most
