"""The sums that the page tells folded: a capacity, a grouped product, messages over cards."""

from math import comb

import pytest
import torch

from mgpu_tutorial.experts.layer import choose, skewed, tokens_per_expert


@pytest.mark.parametrize(
    "skew, factor, dropped, empty",
    [(1, 1.0, 42.3, 42.3), (1, 4.0, 0, 75), (0, 1.0, 5.2, 5.2), (0, 1.25, 0, 20)],
)
def test_a_capacity_drops_choices_or_pads_places(skew, factor, dropped, empty):
    bias = (skew - 1) * 24 * torch.arange(16) / 1024  # -24: takes the preference away
    counts = tokens_per_expert(choose(skewed(0) + bias, k=2), 16)
    places = int(counts.sum() * factor / 16)  # of each expert
    kept = counts.clamp(max=places).sum().item()
    assert 100 * (1 - kept / counts.sum().item()) == pytest.approx(dropped, abs=0.05)
    assert 100 * (1 - kept / (16 * places)) == pytest.approx(empty, abs=0.05)


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
