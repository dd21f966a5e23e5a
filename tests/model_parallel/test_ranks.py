"""Two ranks with a stage each train as one process does."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from mgpu_tutorial.model_parallel.ranks import train_split
from mgpu_tutorial.shared import small_and_large as sizes


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_the_loss_after_a_step_is_that_of_one_process(ranks, layers):
    first, last = ranks(2, train_split, layers, sizes.small, sizes.SMALL, SGD).results
    model = sizes.small()
    stepping = SGD(model.parameters())
    for _ in range(2):
        stepping.zero_grad()
        loss = cross_entropy(model(sizes.SMALL[:, :-1]).mT, sizes.SMALL[:, 1:])
        loss.backward()
        stepping.step()
    assert first is None
    torch.testing.assert_close(last, loss.detach(), rtol=0, atol=1e-5)
