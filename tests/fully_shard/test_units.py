"""What the text says of adapters, micro-batches, norms, optimizers and methods, run."""

import gc
import time
from collections import Counter

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel

from mgpu_tutorial.fully_shard import figures, units
from mgpu_tutorial.lab import Ledger, RankFailed
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.sharding.zero import recompute
from tests.fully_shard.reference import new_model, train


def step_of_adapters(rank, world_size):
    model = units.new_model(torch.float64)
    units.adapt(model)
    units.shard_blocks(model)
    units.loss_of(model, units.share_of_batch(rank, world_size)).backward()
    return [p.grad.full_tensor() for p in model.parameters() if p.requires_grad]


def test_adapters_change_nothing_at_first_and_are_trained_as_in_one_process(ranks):
    model, tokens = new_model(), units.share_of_batch(0, 1)
    before = model(tokens)
    units.adapt(model)
    torch.testing.assert_close(model(tokens), before)
    expected = train(model)
    for found in ranks(3, step_of_adapters).results:
        assert largest_difference(found, expected) < 1e-12


def by_one(model, micro_batches, waits):
    """Backward of each micro-batch; where it waits, gradients are sent with the last."""
    for i, tokens in enumerate(micro_batches):
        model.set_requires_gradient_sync(not waits or i == len(micro_batches) - 1)
        (units.loss_of(model, tokens) / len(micro_batches)).backward()


def held():
    """The bytes of all tensors of this process, and of the gradients behind them."""
    time.sleep(0.2)  # a thread of the process group may let go a little later
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None and tensor.device.type != "meta":
                    storage = figures.here(tensor).untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(nbytes for place, nbytes in storages.items() if place)


def accumulate(rank, world_size, waits, dtype):
    """The bytes that appear until the last of four micro-batches, and the gradients."""
    model, seen = units.new_model(dtype), []
    units.shard_blocks(model)
    model.register_forward_pre_hook(lambda *_: seen.append(held()), prepend=True)
    by_one(model, units.share_of_batch(rank, world_size).chunk(4), waits)
    return seen[-1] - seen[0], [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("waits", [False, True])
def test_micro_batches_add_up_to_the_batch(ranks, waits):
    expected = [train(new_model())] * 2
    found = [grads for _, grads in ranks(2, accumulate, waits, torch.float64).results]
    assert largest_difference(found, expected) < 1e-12


@pytest.mark.parametrize("waits, shares", [(False, 1), (True, 2)])
def test_gradients_that_wait_are_whole_and_others_a_shard(ranks, waits, shares):
    (nbytes, _), _ = ranks(2, accumulate, waits, torch.float32).results
    assert nbytes == shares * figures.MODEL // 2


def accumulate_only(rank, world_size):
    model = units.new_model()
    units.shard_blocks(model)
    by_one(model, units.share_of_batch(rank, world_size).chunk(4), waits=True)


def test_micro_batches_gather_each_time_and_can_reduce_once(ranks):
    report = ranks(2, accumulate_only, trace=True)
    sent = Counter(event.op for event in report.events if event.rank == 0)
    # the first two blocks twice, the last one and the root once, for each micro-batch
    assert sent == {"all_gather_single": 4 * 6, "reduce_scatter_single": 4}


def activations(rank, world_size, is_recomputed):
    """The most bytes that autograd keeps on this rank in a step, without parameters."""
    model, ledger = units.new_model(), Ledger()
    if is_recomputed:
        for block in model.blocks:
            recompute(block)
    units.shard_blocks(model)

    def look(block, inputs):
        there = [p for p in model.parameters() if not isinstance(p, DTensor)]
        ledger.add("parameters", there)  # which are no activations

    for block in model.blocks:
        block.register_forward_pre_hook(look)
    with ledger.saved_for_backward():
        units.loss_of(model, units.share_of_batch(rank, world_size)).backward()
    return ledger.saved_peak(torch.get_default_device())


def test_recomputed_blocks_keep_less_than_a_seventh(ranks):
    kept, again = (ranks(2, activations, how).results[0] for how in (False, True))
    assert 7 * again < kept


def clip(rank, world_size):
    """The norm of this rank's own shards, and the one by which PyTorch clips."""
    model = units.new_model(torch.float64)
    units.shard_blocks(model)
    units.loss_of(model, units.share_of_batch(rank, world_size)).backward()
    own = torch.stack([p.grad.to_local().norm() for p in model.parameters()]).norm()
    return own, clip_grad_norm_(model.parameters(), max_norm=0.1).full_tensor()


def test_pytorch_clips_by_the_norm_of_all_shards_and_a_rank_knows_its_own(ranks):
    expected = torch.stack([grad.norm() for grad in train(new_model())]).norm()
    for own, norm in ranks(2, clip).results:
        torch.testing.assert_close(norm, expected)
        assert own < 0.8 * expected


def moved_by_muon(gradient):
    """How one step of Muon moves a matrix that has this gradient."""
    matrix = torch.nn.Parameter(torch.zeros_like(gradient))
    matrix.grad = gradient
    torch.optim.Muon([matrix], lr=1.0).step()
    return matrix.detach()


def muon(rank, world_size):
    """How far its own rows alone, and the DTensor, are from the right rows; the calls."""
    model = units.new_model()
    units.shard_blocks(model)
    units.loss_of(model, units.share_of_batch(rank, world_size)).backward()
    gradient = model.blocks[0].attention.query.weight.grad
    right = moved_by_muon(gradient.full_tensor()).chunk(world_size)[rank]
    alone = moved_by_muon(gradient.to_local())
    with CommDebugMode() as calls:
        sharded = moved_by_muon(gradient).to_local()
    far = [((rows - right).norm() / right.norm()).item() for rows in (alone, sharded)]
    return far, calls.get_total_counts()


def test_muon_is_wrong_on_rows_and_right_on_a_dtensor_with_sixteen_calls(ranks):
    for (alone, sharded), calls in ranks(2, muon).results:
        assert round(alone, 1) == 0.6 and sharded < 0.05 and calls == 16


class WithEncode(units.SmallTransformer):
    def encode(self, tokens):
        return self.token(tokens)


def encode(rank, world_size, is_registered, is_after):
    model = WithEncode(vocabulary=64, width=32, heads=4, depth=3)
    units.shard_blocks(model)
    tokens = units.share_of_batch(rank, world_size)
    if is_registered:
        register_fsdp_forward_method(model, "encode")
    if is_after:
        model(tokens)
    return isinstance(model.encode(tokens), torch.Tensor)


@pytest.mark.parametrize("is_registered, is_after", [(True, False), (False, True)])
def test_another_method_works_where_it_is_registered_or_right_after_forward(
    ranks, is_registered, is_after
):
    assert all(ranks(2, encode, is_registered, is_after).results)


def test_another_method_meets_dtensors(ranks):
    with pytest.raises(RankFailed, match="DTensor"):
        ranks(2, encode, False, False)


def average_of(rank, world_size):
    model = units.new_model()
    units.shard_blocks(model)
    AveragedModel(model)


def test_a_sharded_module_refuses_to_be_copied(ranks):
    with pytest.raises(RankFailed, match="deepcopy"):
        ranks(2, average_of)


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
