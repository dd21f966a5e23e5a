"""Every way to shard, to go back and to reduce gives the gradients of one process."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grad_norm_

from mgpu_tutorial.fully_shard import figures, large, steps, units
from mgpu_tutorial.lab import RankFailed
from tests.fully_shard.reference import gradients

PLAN = [units.shard_blocks]
IN_PARTS = {"backward": steps.accumulate_gradients, "parts": 4}


def on_a_mesh(copies, shards):
    return [partial(steps.shard_on_a_mesh, copies=copies, shards=shards)]


def offloaded(model):
    units.shard_blocks(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


@pytest.mark.parametrize(
    ("world_size", "prepare", "step"),
    [
        (1, PLAN, {}),
        (3, PLAN, {}),
        (2, PLAN, IN_PARTS),
        (2, PLAN, {"parts": 3}),
        (2, [large.recompute, *PLAN], {}),
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


def test_a_rank_keeps_its_part_of_everything(ranks):
    found = ranks(4, figures.measure, PLAN).results[0]
    whole = 4 * 41_888
    assert (found["parameters"], found["gradients"]) == (whole // 4, whole // 4)
    assert found["Adam"] == 2 * whole // 4


@pytest.mark.parametrize(("copies", "shards"), [(1, 4), (2, 2), (4, 1)])
def test_a_mesh_cuts_by_its_second_number(ranks, copies, shards):
    found = ranks(4, figures.measure, on_a_mesh(copies, shards)).results[3]
    assert found["parameters"] == 4 * 41_888 // shards


def test_without_synchronisation_the_gradients_stay_whole(ranks):
    sent = ranks(2, figures.measure, PLAN, parts=4).results[0]
    kept = ranks(2, figures.measure, PLAN, **IN_PARTS).results[0]
    assert (sent["between"], kept["between"]) == (2 * 41_888, 4 * 41_888)


def test_recomputation_keeps_less(ranks):
    whole = ranks(2, figures.measure, PLAN).results[0]["activations"]
    less = ranks(2, figures.measure, [large.recompute, *PLAN]).results[0]["activations"]
    assert less < whole / 5


@pytest.mark.parametrize(
    ("policy", "computed", "mean"),
    [
        (MixedPrecisionPolicy(), torch.float32, 128.5),
        (MixedPrecisionPolicy(torch.bfloat16, torch.float32), torch.bfloat16, 128.5),
        (MixedPrecisionPolicy(torch.bfloat16), torch.bfloat16, 128.0),
    ],
)
def test_a_sum_in_bfloat16_loses_what_is_small(ranks, policy, computed, mean):
    found = ranks(2, steps.one_weight, policy).results
    assert found == [(torch.float32, computed, mean)] * 2


def test_the_norm_to_clip_by_is_that_of_all_shards(ranks):
    norm = torch.stack([g.norm() for g in gradients().values()]).norm()
    alone = [float(mine) for mine, _ in ranks(2, steps.clip).results]
    assert [all_ranks for _, all_ranks in ranks(2, steps.clip).results] == [f"{norm:.2f}"] * 2
    assert sum(x**2 for x in alone) == pytest.approx(norm.item() ** 2, rel=0.01)


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


@pytest.mark.slow
def test_an_early_optimizer_trains_nothing_and_a_late_one_does(ranks):
    for first, last in ranks(2, units.optimizer_too_early).results:
        assert first == last
    for losses in ranks(2, trained).results:
        assert losses[-1] < losses[0] / 2


def trained(rank, world_size):
    model = units.new_model()
    units.shard_blocks(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return units.train(model, optimizer, rank, world_size, [0] * 20)


def test_a_forgotten_root_leaves_gradients_of_each_rank(ranks):
    (count, first), (_, second) = ranks(2, units.forget_the_root).results
    assert count == 4 and first != second
