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
from tests.fully_shard.reference import new_model, train

WAYS = {
    "the plan": [units.shard_blocks],
    "a mesh": [lambda model: units.shard_on_a_mesh(model, copies=2, shards=2)],
    "adapters": [units.adapt, units.shard_blocks],
}


def gradients_of(rank, world_size, way):
    model = units.new_model(torch.float64)
    for change in WAYS[way]:
        change(model)
    units.loss_of(model, units.share_of_batch(rank, world_size)).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    return [p.grad.full_tensor() for p in trained]


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_one_process(ranks, way):
    model = new_model()
    if way == "adapters":
        units.adapt(model)
    expected = train(model)
    for found in ranks(4, gradients_of, way).results:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_no_row_of_the_last_table_is_far_from_one_process(ranks):
    offload = partial(units.shard_blocks, offload_policy=fsdp.CPUOffloadPolicy(False))
    ways = {"DDP": [figures.with_ddp], "offloaded": [offload]}
    for distances in ranks(2, figures.furthest, ways).results:
        assert max(distances) < 1e-12


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
