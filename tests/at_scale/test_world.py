"""A pretended rank of a large world."""

from functools import partial

import pytest

from mgpu_tutorial.at_scale import world
from mgpu_tutorial.shared.cost_model.plans import Model
from mgpu_tutorial.shared.models import SmallTransformer

STAGE = partial(SmallTransformer, vocabulary=512, width=1024, heads=8, depth=2)


@pytest.mark.slow
def test_a_rank_computes_what_the_cost_model_counts(ranks):
    """An eighth of the matrices and the whole head; PyTorch counts no attention here."""
    report = ranks(1, world.two_steps, (16, 16, 8), STAGE, backend="none", device="cpu")
    flops, kept = report.results[0]
    model = Model(2, 1024, 8, sequence=64, vocabulary=512)
    assert flops == 64 * 3 * (2 * model.layer_flops() / 8 + model.head_flops())
    blocks = 2 * 12 * 1024**2 / 8 / 16
    rest = (512 + 64) * 1024 / 16
    assert kept == pytest.approx(blocks + rest, rel=0.05) and kept > blocks + rest
