"""What cannot be compared is refused, before anything is sent."""

import pytest

from mgpu_tutorial.comparison import training
from mgpu_tutorial.shared.data import pictures

TINY = training.Experiment("shufflenet_v2_x0_5", 8, 48, 1)
DDP = training.SETUPS["DDP"]


def train(rank, world_size, setup, experiment, count=2):
    data = pictures()
    return training.train_setup(rank, world_size, data, setup, experiment, count)


REFUSED = [
    (3, "a batch of 8 for 3 ranks", train, (DDP, TINY)),
    (2, "a batch of 1 for 2 ranks", train, (DDP, TINY._replace(batch=1))),
]


@pytest.mark.parametrize("world_size, words, worker, given", REFUSED)
def test_refused(refused, world_size, words, worker, given):
    refused(world_size, ValueError(words), worker, *given)
