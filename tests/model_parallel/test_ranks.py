"""Two ranks with a stage each train as one process does."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from mgpu_tutorial.model_parallel.ranks import train_split
from mgpu_tutorial.shared import small_and_large as sizes


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_the_loss_after_a_step_is_that_of_one_process(ranks, layers):
    first, last = ranks(2, train_split, layers, sizes.small, sizes.SMALL, SGD).results
    (alone,) = ranks(1, sizes.train, nn.Sequential, sizes.small, sizes.SMALL, SGD).results
    assert first is None
    torch.testing.assert_close(last, alone, rtol=0, atol=1e-5)
