"""Adapters and micro-batches train as in one process; what the text says is refused."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grad_norm_

from mgpu_tutorial.fully_shard import figures, units
from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.lab.measure import largest_difference
from tests.fully_shard.reference import new_model, train


def test_adapters_change_nothing_at_first_and_are_trained_as_in_one_process(ranks):
    model, tokens = new_model(), units.share_of_batch(0, 1)
    before = model(tokens)
    units.adapt(model)
    torch.testing.assert_close(model(tokens), before)
    expected = train(model)
    for found in ranks(3, figures.step, [units.adapt, units.shard_blocks]).results:
        assert largest_difference([*found.values()], expected) < 1e-12


def accumulate(rank, world_size):
    model = units.new_model(torch.float64)
    units.shard_blocks(model)
    units.accumulate_gradients(model, units.share_of_batch(rank, world_size).chunk(4))
    return [p.grad.full_tensor() for p in model.parameters()]


def test_micro_batches_add_up_to_the_batch(ranks):
    expected = [train(new_model())] * 2
    assert largest_difference(ranks(2, accumulate).results, expected) < 1e-12


def clip_on_two_meshes(rank, world_size):
    """Tensor parallel in the perceptrons and `fully_shard` around everything."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = units.new_model()
    for block in model.blocks:
        cut = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], cut)
    units.shard_blocks(model, mesh=mesh["dp"])
    units.loss_of(model, units.share_of_batch(mesh.get_local_rank("dp"), 2)).backward()
    clip_grad_norm_(model.parameters(), 1.0)


def test_the_norms_of_two_meshes_are_not_combined(ranks):
    with pytest.raises(RankFailed, match="must have the same mesh"):
        ranks(4, clip_on_two_meshes)


def tie_across_units(rank, world_size):
    model = units.new_model()
    fully_shard(model.token)
    units.shard_blocks(model)
    units.loss_of(model, units.share_of_batch(rank, world_size)).backward()


def test_a_tied_weight_in_two_units_is_refused(ranks):
    with pytest.raises(RankFailed, match=r"fully_shard\(\[module_a, module_b\]\)"):
        ranks(2, tie_across_units)
