"""Every way to shard, to go back and to reduce gives the gradients of one process."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grad_norm_

from mgpu_tutorial.fully_shard import figures, steps, units
from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.sharding.zero3 import recompute
from tests.fully_shard.reference import gradients

PLAN = [units.shard_blocks]
IN_PARTS = {"backward": steps.accumulate_gradients, "parts": 4}


def on_a_mesh(copies, shards):
    return [partial(steps.shard_on_a_mesh, copies=copies, shards=shards)]


def recomputed(model):
    for block in model.blocks:
        recompute(block)


def offloaded(model):
    units.shard_blocks(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


@pytest.mark.parametrize(
    ("world_size", "prepare", "step"),
    [
        (1, PLAN, {}),
        (3, PLAN, {}),
        (2, PLAN, IN_PARTS),
        (2, PLAN, {"parts": 3}),
        (2, [recomputed, *PLAN], {}),
        (4, on_a_mesh(2, 2), {}),
        (4, on_a_mesh(4, 1), {}),
        (2, [offloaded], {}),
        (3, [figures.with_ddp], {}),
    ],
)
def test_gradients_are_those_of_one_process(ranks, world_size, prepare, step):
    report = ranks(world_size, figures.measure, prepare, dtype=torch.float64, **step)
    for result in report.results:
        torch.testing.assert_close(result["whole"], gradients(), rtol=0, atol=1e-12)


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
