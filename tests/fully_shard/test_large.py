"""Adapters train alone, and as in one process."""

import torch

from mgpu_tutorial.fully_shard import figures, large, units
from tests.fully_shard.reference import new_model

ADAPTED = [large.adapt, units.shard_blocks]


def test_adapters_change_nothing_at_first_and_alone_are_trained():
    model, tokens = new_model(), units.share_of_batch(0, 1)
    before = model(tokens)
    large.adapt(model)
    torch.testing.assert_close(model(tokens), before)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 12 and all(
        name.endswith(("down.weight", "up.weight")) for name in trained
    )


def adapted_gradients(rank, world_size):
    found = figures.measure(rank, world_size, ADAPTED, dtype=torch.float64)
    return found["whole"]


def test_the_gradients_of_adapters_are_those_of_one_process(ranks):
    (alone,) = ranks(1, adapted_gradients).results
    for found in ranks(3, adapted_gradients).results:
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)
