"""Adapters, graphs and whole matrices: what `fully_shard` sends and computes of them."""

import pytest
import torch

from mgpu_tutorial.fully_shard import figures, large, units
from tests.fully_shard.reference import gradients, new_model

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


def test_adapters_save_gradients_and_no_gathers(ranks):
    whole = ranks(4, figures.measure, [units.shard_blocks], trace=True)
    tuned = ranks(4, figures.measure, ADAPTED, trace=True)
    assert tuned.results[0]["gradients"] == 4 * 3 * 2 * 2 * 4 * 32 // 4
    assert figures.traffic_of(whole)["gathered"] == "1.60"
    assert figures.traffic_of(tuned)["gathered"] == "1.66"
    assert figures.traffic_of(tuned)["reduced"] == "0.04"


def adapted_gradients(rank, world_size):
    found = figures.measure(rank, world_size, ADAPTED, dtype=torch.float64)
    return found["whole"]


def test_the_gradients_of_adapters_are_those_of_one_process(ranks):
    (alone,) = ranks(1, adapted_gradients).results
    for found in ranks(3, adapted_gradients).results:
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_the_compiler_gets_blocks_around_units_and_buckets_around_ddp(ranks):
    ways = (
        "compile(DDP(model))",
        "compile(DDP(model)), buckets of 1 MB",
        "compile(fully_shard(model))",
        "fully_shard, each block compiled",
    )
    ddp, cut, units, blocks = ranks(2, figures.compile_ways, ways).results[0]
    assert len(cut) == 10 and sum(cut) == sum(ddp)
    assert len(units) == 1 and blocks[0] < sum(ddp) / 3


@pytest.mark.slow
def test_muon_of_whole_matrices_is_that_of_one_process(ranks):
    model = new_model()
    for p, gradient in zip(model.parameters(), gradients().values(), strict=True):
        p.grad = gradient
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    before = [p.detach().clone() for p in matrices]
    torch.optim.Muon(matrices, lr=0.1).step()
    one = torch.cat([(p - b).flatten() for p, b in zip(matrices, before, strict=True)])
    apart = {}
    for step in (figures.on_shards, figures.on_dtensors, large.muon_step):
        calls, moved = ranks(2, figures.muon, step).results[1]
        apart[step] = (torch.cat([m.flatten() for m in moved]) - one.detach()).norm()
    assert apart[large.muon_step] < 0.02 * one.norm()
    assert apart[figures.on_dtensors] < 0.1 * one.norm()
    assert apart[figures.on_shards] > 0.3 * one.norm()
    assert calls == 2 * len(matrices)
