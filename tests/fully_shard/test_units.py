"""Every way to shard gives the gradients of one process; what the text says is refused."""

from functools import partial

import pytest
import torch
from torch.distributed import fsdp
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

OFFLOAD = fsdp.CPUOffloadPolicy(pin_memory=False)
WAYS = {
    "the plan": [units.shard_blocks],
    "a mesh": [partial(units.shard_on_a_mesh, copies=2, shards=2)],
    "offloaded": [partial(units.shard_blocks, offload_policy=OFFLOAD)],
    "DDP": [figures.with_ddp],
    "adapters": [units.adapt, units.shard_blocks],
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_one_process(ranks, way):
    model = new_model()
    if way == "adapters":
        units.adapt(model)
    expected = train(model)
    for found in ranks(4, figures.gradients_by, {way: WAYS[way]}).results:
        assert largest_difference([*found[way].values()], expected) < 1e-12


def accumulate(rank, world_size, parts):
    model = units.new_model(torch.float64)
    units.shard_blocks(model)
    units.accumulate_gradients(model, units.share_of_batch(rank, world_size).chunk(parts))
    return [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("world_size, parts", [(2, 4), (3, 1)])
def test_micro_batches_add_up_to_the_batch_and_each_unit_is_reduced_once(
    ranks, world_size, parts
):
    report = ranks(world_size, accumulate, parts, trace=True)
    expected = [train(new_model())] * world_size
    assert largest_difference(report.results, expected) < 1e-12
    calls = [event.op for event in report.events if event.rank == 0]
    assert calls.count("reduce_scatter_single") == 4


def test_adapters_change_nothing_at_first_and_alone_are_trained():
    model, tokens = new_model(), units.share_of_batch(0, 1)
    before = model(tokens)
    units.adapt(model)
    torch.testing.assert_close(model(tokens), before)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    ends = "down.weight", "up.weight"
    assert len(trained) == 12 and all(name.endswith(ends) for name in trained)


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
