"""Positions in the block; its loss and gradients stand in the chapter's tables."""

import torch

from mgpu_tutorial.long_sequences import block


def test_rope_turns_by_the_distance_of_two_tokens():
    q, k = torch.randn(2, 1, 6, dtype=torch.float64)

    def score(*places):
        turned = map(block.rotate, (q, k), torch.tensor(places).split(1))
        return torch.mul(*turned).sum()

    torch.testing.assert_close(score(7, 3), score(24, 20), rtol=0, atol=1e-5)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3
