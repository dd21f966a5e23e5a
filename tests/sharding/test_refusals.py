"""What a stage can't do it refuses on every rank; what it does is what one process does."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, SGD, Adam

from mgpu_tutorial.distributed_sgd.sgd import average_gradients
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.sharding import stages, zero
from mgpu_tutorial.sharding.blocks import (
    PrefetchingBlock,
    ShardedBlock,
    fully_sharded,
    linked,
)
from mgpu_tutorial.sharding.stages import ShardedModel, ShardedOptimizer, clip_shards
from mgpu_tutorial.shared.checkpoint import save
from mgpu_tutorial.tensor_parallel.block import PLAN, new_block, parallelize
from mgpu_tutorial.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


def tied(*_):
    return Tied()


def frozen(*_):
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False))


def mixed(*_):
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())


def plain(*_):
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def renormed(*_):
    return nn.Sequential(nn.Embedding(4, 3, max_norm=1.0), nn.Linear(3, 3))


def shard_a_block(rank, world_size, make):
    ShardedBlock(make())


def shard_a_model(rank, world_size, make):
    ShardedModel(make())


def save_as_if_whole(rank, world_size, make):
    module = make()
    optimizer = SGD(module.parameters(), lr=0.1)
    save("never.pt", module, optimizer)


def save_a_block(rank, world_size):
    save_as_if_whole(rank, world_size, lambda: ShardedBlock(plain()))


def save_a_flat(rank, world_size):
    def make():
        module = plain()
        zero.FlatParameters(module)
        return module

    save_as_if_whole(rank, world_size, make)


def tied_blocks(*_):
    module = Tied()
    return nn.Sequential(module.one, module.two)


def nested(*_):
    return nn.Sequential(nn.Sequential(nn.Linear(3, 3)))


def shard_with(rank, world_size, make, names):
    """A model with the blocks of these names, once as a function and once as a class."""
    module = make()
    parts = dict(module.named_modules()) | {"another": nn.Linear(3, 3)}
    blocks = [] if names == "none" else [parts[name] for name in names.split(", ")]
    with pytest.raises(ValueError) as said:
        fully_sharded(module, blocks)
    try:
        ShardedModel(module, blocks=blocks)
    except ValueError as error:
        assert str(error) == str(said.value)
        raise


def shard_each_parameter(rank, world_size, make):
    zero.shard_parameters(make())


def lay_flat(rank, world_size, make):
    zero.FlatParameters(make())


def share_between_blocks(rank, world_size):
    module = Tied()
    ShardedBlock(module.one)
    ShardedBlock(module.two)


def shard_again(rank, world_size, first, second):
    first(module := plain())
    second(module)


def shard_a_block_again(rank, world_size):
    ShardedBlock(ShardedBlock(plain()))


def shard_a_model_in_short(rank, world_size):
    ShardedModel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.bfloat16)


def compute_in(rank, world_size, dtype):
    ShardedModel(nn.Sequential(plain()), dtype)


def leave_a_layer_out(rank, world_size):
    linked([PrefetchingBlock(plain()), nn.Linear(3, 3)])


def own_nothing(rank, world_size):
    ShardedOptimizer(plain().requires_grad_(False).parameters(), Adam)


def own_twice(rank, world_size):
    ShardedOptimizer([*plain().parameters()] * 2, Adam)


def step_without_backward(rank, world_size):
    ShardedOptimizer(plain().parameters(), SGD, lr=0.1).step()


def with_gradients(module):
    module(torch.ones(2, 3)).sum().backward()
    return module


def step_by_owner(rank, world_size, owner, of="all"):
    parameters = list(with_gradients(plain()).parameters())
    mine = parameters if of == "all" else []
    zero.sharded_step(parameters, owner, SGD([{"params": mine}], lr=0.1))


def step_flat_without_backward(rank, world_size):
    flat = zero.FlatParameters(plain())
    flat.step(SGD([flat.shard], lr=0.1))


def step_flat_by_another_optimizer(rank, world_size):
    module = plain()
    optimizer = SGD(module.parameters(), lr=0.1)  # as one makes it before
    flat = zero.FlatParameters(module)
    with_gradients(module)
    flat.step(optimizer)


def step_flat_after_a_conversion(rank, world_size):
    module = plain()
    flat = zero.FlatParameters(module)
    module.double()(torch.ones(2, 3).double()).sum().backward()
    flat.step(SGD([flat.shard], lr=0.1))


def recompute_batch_norm(rank, world_size):
    zero.recompute(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def recompute_spectral(rank, world_size, norm):
    zero.recompute(nn.Sequential(norm(nn.Linear(3, 3))))


def cut_unevenly(rank, world_size):
    zero.shard_of(torch.ones(4))


def prepare_stage(rank, world_size, stage, make=plain):
    stages.prepare(stage, make())


def keep_the_gradients(rank, world_size, owner=None):
    """Two steps without zero_grad: the second would take an averaged gradient as its own."""
    module = plain()
    parameters = list(module.parameters())
    optimizer = ShardedOptimizer(parameters, SGD, lr=0.1)
    for _ in range(2):
        with_gradients(module)
        if owner:
            zero.sharded_step(parameters, owner, SGD(parameters, lr=0.1))
        else:
            optimizer.step()


def load(rank, world_size, whole=True, **how):
    model = ShardedModel(plain())
    before = model.shards[0].detach().clone()
    state = plain().state_dict() if whole else model.state_dict()
    try:
        model.load_state_dict({name: 2 * value for name, value in state.items()}, **how)
    finally:
        assert torch.equal(model.shards[0], before)


def load_loosely(rank, world_size):
    load(rank, world_size, strict=False)


def load_by_assigning(rank, world_size):
    load(rank, world_size, whole=False, assign=True)


def of_another_dtype(rank, world_size, make):
    make(plain().to(torch.bfloat16 if rank else torch.float16))


def of_another_seed(rank, world_size):
    torch.manual_seed(rank)
    zero.shard_parameters(nn.Linear(3, 3))


def own_in_another_order(rank, world_size):
    parameters = list(nn.Sequential(plain(), nn.Linear(3, 3)).parameters())
    ShardedOptimizer(parameters[::-1] if rank else parameters, SGD, lr=0.1)


def two_equal_layers():
    torch.manual_seed(0)
    return [nn.Linear(3, 3, bias=False).weight for _ in range(2)]


def own_equal_shapes_in_another_order(rank, world_size):
    ShardedOptimizer(two_equal_layers()[:: -1 if rank else 1], SGD, lr=0.1)


def own_by(rank, world_size, how):
    layer = plain()
    given = {"named": layer.named_parameters(), "alone": layer.weight}
    ShardedOptimizer(given[how], SGD, lr=0.1)


def with_gaps(*_):
    module = plain()
    module.weight = nn.Parameter(torch.randn(3, 6)[:, :3])  # cut from a wider one
    return module


def own_with_gaps(rank, world_size):
    ShardedOptimizer(with_gaps().parameters(), SGD, lr=0.1)


def cut_by_a_plan():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return parallelize(model, {"0": ColumnParallelLinear, "2": RowParallelLinear})


def lay_flat_what_is_cut(rank, world_size):
    zero.FlatParameters(cut_by_a_plan())


def step_what_is_cut(rank, world_size):
    parameters = list(cut_by_a_plan().parameters())
    zero.sharded_step(parameters, [0] * 4, SGD(parameters, lr=0.1))


def average_what_is_cut(rank, world_size):
    model = cut_by_a_plan()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    average_gradients(model)


def own_a_set(rank, world_size, in_a_group):
    parameters = set(plain().parameters())
    ShardedOptimizer([{"params": parameters}] if in_a_group else parameters, SGD, lr=0.1)


def step_the_inner_optimizer(rank, world_size, stage):
    module = plain()
    prepared = stages.prepare(stage, module)
    before = module.weight.detach().clone()
    with_gradients(module)
    try:
        prepared.optimizer.step()
    finally:
        assert torch.equal(module.weight, before)
        prepared.step()
        assert not torch.equal(module.weight, before)


def step_thawed(rank, world_size, stage):
    """The second layer is frozen while the first is sharded, and trained from then on."""
    prepared = stages.prepare(stage, module := frozen())
    module.requires_grad_(True)
    with_gradients(module)
    before = [p.detach().clone() for p in module.parameters()]
    try:
        prepared.step()
    finally:
        assert all(map(torch.equal, before, module.parameters()))


def step_flat_after_an_addition(rank, world_size):
    module = plain()
    flat = zero.FlatParameters(module)
    module.more = nn.Linear(3, 3)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    flat.step(SGD([flat.shard], lr=0.1))


def step_more_than_was_given(rank, world_size):
    optimizer = ShardedOptimizer((module := plain()).parameters(), SGD, lr=0.1)
    optimizer.inner.add_param_group({"params": nn.Linear(3, 3).parameters()})
    with_gradients(module)
    optimizer.step()


def shard_what_is_recomputed(rank, world_size, make):
    model = nn.Sequential(nn.Sequential(plain()), plain())
    zero.recompute(model[0])
    make(model)


def prepare_by_closure(rank, world_size, stage, kind):
    stages.prepare(stage, plain(), kind)


def own_by_closure(rank, world_size):
    ShardedOptimizer(plain().parameters(), LBFGS)


def step_by_closure(rank, world_size, stage):
    """A closure that goes backward: its gradients would be those of this rank."""
    prepared = stages.prepare(stage, module := plain())

    def closure():
        loss = module(torch.full((1, 3), rank + 1.0)).sum()
        loss.backward()
        return loss

    closure()
    prepared.step(closure)


def step_shards_by_closure(rank, world_size):
    model = ShardedModel(plain())
    LBFGS(model.parameters()).step(lambda: model(torch.ones(1, 3)).sum())


def clip_by(rank, world_size, max_norm):
    clip_shards(SGD(plain().parameters(), lr=0.1), max_norm)


def clip_copies(rank, world_size):
    clip_shards(stages.prepare(0, plain()).optimizer, 1.0)


def initialise_too_late(rank, world_size):
    try:
        ShardedModel(plain()).apply(lambda module: nn.init.zeros_(module.weight))
    except AttributeError as error:
        raise ValueError(error) from None


def share_24_samples(rank, world_size, of=None):
    stages.loss_of(stages.new_tower(), 0, rank if of is None else of, world_size)


NORM = "an embedding with max_norm changes its weight in the forward"
NONE, TIED = "there are no parameters to shard", "is tied to another layer or sharded already"
GAPS = "`weight` is a view with gaps or repetitions in memory"
PART = "`0.weight` is this rank's part of a layer"
LAZY = "has no shape before its lazy layer has seen a batch"
APART = "is tied to another block or sharded already"
REFUSED = {
    "tied parameters": (TIED, shard_each_parameter, tied),
    "tied across blocks": (APART, share_between_blocks),
    "a block of a block": (NONE, shard_a_block_again),
    "a module in two blocks": (NONE, shard_again, ShardedBlock, ShardedBlock),
    "flat, then a block": (APART, shard_again, zero.FlatParameters, ShardedBlock),
    "frozen in a block": ("`1.weight` is frozen", shard_a_block, frozen),
    "two dtypes in a block": ("float32 and float64", shard_a_block, mixed),
    "two dtypes, flat": ("float32 and float64", lay_flat, mixed),
    "two dtypes in a unit": ("float32 and float64", shard_a_model)
    + (lambda *_: nn.ModuleList([mixed()]),),
    "no parameters, flat": (NONE, lay_flat, nn.GELU),
    "no parameters in a block": (NONE, shard_a_block, nn.GELU),
    "a model of tied blocks": (APART, shard_a_model, tied_blocks),
    "a frozen layer in no block": ("`1.weight` is frozen", shard_with, frozen, "none"),
    "tied across chosen blocks": (APART, shard_with, tied, "one, two"),
    "frozen in a chosen block": ("`1.weight` is frozen", shard_with, frozen, "1"),
    "tied to the root": (APART, shard_with, tied, "two"),
    "a block twice": (NONE, shard_with, frozen, "0, 0"),
    "an outer block first": ("number 1 of the blocks", shard_with, nested, "0, 0.0"),
    "a lazy layer": (LAZY, shard_a_model, lambda *_: nn.LazyLinear(3)),
    "a lazy layer, flat": (LAZY, lay_flat, lambda *_: nn.LazyLinear(3)),
    "a set": ("a set of parameters has another order", own_a_set, False),
    "a set in a group": ("a set of parameters has another order", own_a_set, True),
    "clipping by nan": ("max_norm is nan", clip_by, math.nan),
    "clipping by words": ("max_norm is '1.0'", clip_by, "1.0"),
    "a block of another model": ("is not inside the model", shard_with, plain, "another"),
    "the model as its block": ("is not inside the model", shard_with, plain, ""),
    "a model of nothing": (NONE, shard_with, nn.GELU, "none"),
    "a BatchNorm in bfloat16": ("can't compute in torch.bfloat16", shard_a_model_in_short),
    "a layer in no block": ("number 1 is Linear, no sharded block", leave_a_layer_out),
    "nothing to train": ("no parameter to train", own_nothing),
    "a parameter twice": (TIED, own_twice),
    "too few owners": ("as many owners", step_by_owner, [0]),
    "an owner that is no rank": ("each a rank from 0 to 1", step_by_owner, [0, 2]),
    "an empty optimizer": ("the optimizer lacks", step_by_owner, [0, 1], "none"),
    "no backward, flat": ("no gradient in weight, bias", step_flat_without_backward),
    "a layer added later, flat": ("or not there, when", step_flat_after_an_addition),
    "another optimizer, flat": ("the optimizer lacks", step_flat_by_another_optimizer),
    "converted, flat": ("`weight` has left the flat tensor", step_flat_after_a_conversion),
    "BatchNorm recomputed": ("would count each batch twice", recompute_batch_norm),
    "a spectral norm recomputed": ("takes a step in each forward", recompute_spectral)
    + (nn.utils.parametrizations.spectral_norm,),
    "an older spectral norm recomputed": ("takes a step in each", recompute_spectral)
    + (nn.utils.spectral_norm,),
    "pairs of a name and one": ("expected parameters, got tuple", own_by, "named"),
    "a parameter alone": ("one parameter alone, of which rows", own_by, "alone"),
    "LBFGS, stage 0": ("LBFGS computes gradients inside", prepare_by_closure, 0, LBFGS),
    "LBFGS, stage 1": ("LBFGS computes gradients inside", prepare_by_closure, 1, LBFGS),
    "LBFGS, stage 3": ("LBFGS computes gradients inside", prepare_by_closure, 3)
    + (partial(LBFGS, lr=0.1),),
    "LBFGS, sharded": ("LBFGS computes gradients inside", own_by_closure),
    "recomputed, then a model": ("is recomputed already", shard_what_is_recomputed)
    + (ShardedModel,),
    "recomputed, then a block": ("is recomputed already", shard_what_is_recomputed)
    + (ShardedBlock,),
    "recomputed, then blocks": ("is recomputed already", shard_what_is_recomputed)
    + (lambda model: fully_sharded(model, [model[1], model[0]]),),
    "stage 4": ("there is no stage 4", prepare_stage, 4),
    "max_norm at stage 1": (NORM, prepare_stage, 1, renormed),
    "max_norm in a block": (NORM, shard_a_block, renormed),
    "max_norm in a model": (NORM, shard_a_model, renormed),
    "max_norm, each parameter": (NORM, shard_each_parameter, renormed),
    "max_norm, flat": (NORM, lay_flat, renormed),
    "integers": ("can't compute in torch.int64", compute_in, torch.int64),
    "truth values": ("can't compute in torch.bool", compute_in, torch.bool),
    "complex numbers": ("can't compute in torch.complex64", compute_in, torch.complex64),
    "a dtype's name": ("can't compute in 'bfloat16'", compute_in, "bfloat16"),
    "rank 9 of 2": ("no rank 9 of 2", share_24_samples, 9),
    "rank -1 of 2": ("no rank -1 of 2", share_24_samples, -1),
}


@pytest.mark.parametrize("case", REFUSED)
def test_every_rank_refuses_it_before_anything_is_sent(refused, case):
    refused(2, *REFUSED[case])


@pytest.mark.parametrize("worker", [cut_unevenly, share_24_samples])
def test_unequal_parts_are_refused(refused, worker):
    refused(5 if worker is share_24_samples else 3, "equal", worker)


SAME = "must be the same on all ranks, and rank 1 of the group has"
REFUSED_LATER = {
    "gaps, a model": (GAPS, shard_a_model, with_gaps),
    "gaps, stage 0": (GAPS, prepare_stage, 0, with_gaps),
    "gaps, stage 2": (GAPS, prepare_stage, 2, with_gaps),
    "gaps, an optimizer": ("`parameter 0` is a view with gaps", own_with_gaps),
    "a plan's shards, flat": (PART, lay_flat_what_is_cut),
    "a plan's shards, by owner": ("is this rank's part of a layer", step_what_is_cut),
    "a plan's shards, averaged": (PART, average_what_is_cut),
    "two dtypes, a model": (SAME, of_another_dtype, ShardedModel),
    "two dtypes, stage 0": (SAME, of_another_dtype, partial(stages.prepare, 0)),
    "two dtypes, stage 1": (SAME, of_another_dtype, partial(stages.prepare, 1)),
    "two dtypes, stage 2": (SAME, of_another_dtype, partial(stages.prepare, 2)),
    "two seeds, each parameter": (SAME, of_another_seed),
    "another order of shapes": (SAME, own_in_another_order),
    "another order": ("of rank 0 in another order", own_equal_shapes_in_another_order),
    "the inner optimizer, stage 1": ("call the `step` of", step_the_inner_optimizer, 1),
    "the inner optimizer, stage 2": ("call the `step` of", step_the_inner_optimizer, 2),
    "clipping, stage 0": ("at stage 0 each rank has all gradients", clip_copies),
    "a closure, stage 0": ("a closure would compute gradients", step_by_closure, 0),
    "LBFGS of shards": ("LBFGS computes gradients inside", step_shards_by_closure),
    "thawed, stage 1": ("was frozen, or not there, when the others", step_thawed, 1),
    "thawed, stage 2": ("was frozen, or not there, when the others", step_thawed, 2),
    "parameters added later": (
        "2 parameters were added to the inner",
        step_more_than_was_given,
    ),
    "a whole state": ("weight, bias has no shards", load),
    "a whole state, loosely": ("weight, bias has no shards", load_loosely),
    "a state assigned": ("assign=True would replace", load_by_assigning),
    "apply": ("initialise the module before", initialise_too_late),
    "parameters sharded twice": (TIED, shard_again) + (zero.shard_parameters,) * 2,
    "sharded, then flat": (TIED, shard_again, zero.shard_parameters, zero.FlatParameters),
}


def skip_a_bad_batch(rank, world_size, stage):
    ready = stages.prepare(stage, plain(), partial(SGD, lr=0.1))
    ready.model(1000 * torch.ones(2, 3)).square().mean().backward()
    ready.optimizer.zero_grad()  # of a batch that is skipped
    ready.model(torch.ones(2, 3)).square().mean().backward()
    ready.step()
    ready.optimizer.zero_grad()
    ready.model(torch.ones(2, 3)).square().mean().backward()  # the usual loop goes on
    ready.step()
    return ready.model(torch.ones(2, 3)).detach()


def two_steps(rank, world_size):
    module = plain()
    optimizer = SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        module(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
    return module(torch.ones(2, 3)).detach()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_grad_of_the_optimizer_takes_all_gradients_away(ranks, stage):
    (one,) = ranks(1, two_steps).results
    for found in ranks(2, skip_a_bad_batch, stage).results:
        assert largest_difference(found, one) < 1e-6


@pytest.mark.parametrize("case", REFUSED_LATER)
def test_every_rank_refuses_it_before_anything_is_changed(refused, case):
    refused(2, *REFUSED_LATER[case], sent=True)


def step_in_between(rank, world_size, kind):
    block = kind(plain())
    loss = block(torch.ones(2, 3, requires_grad=True)).square().sum()
    with torch.no_grad():
        block.shard += 1
    loss.backward()


def differentiate_twice(rank, world_size, kind):
    block = kind(plain())
    loss = block(torch.ones(2, 3)).square().sum()
    torch.autograd.grad(loss, [*block.parameters()], create_graph=True)


def test_a_step_without_backward_is_refused(refused):
    words = "no gradient in parameter 0, parameter 1"
    refused(2, words, step_without_backward, sent=True)  # all start from rank 0's values


@pytest.mark.parametrize("owner", [None, [0, 1]])
def test_gradients_of_the_last_step_are_refused(refused, owner):
    words = "gradients of the last step are still there"
    refused(2, words, keep_the_gradients, owner, sent=True)


def read_a_child(rank, world_size):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3)])

        def forward(self, x):
            return nn.functional.linear(x, self.layers[0].weight)

    try:
        ShardedModel(Reads())(torch.ones(1, 3))
    except AttributeError as error:
        raise ValueError(error) from None


@pytest.mark.parametrize("kind", [ShardedBlock, PrefetchingBlock])
@pytest.mark.parametrize(
    "words, worker",
    [
        ("between forward and backward", step_in_between),
        ("a second derivative through Gather is not computed", differentiate_twice),
    ],
)
def test_what_backward_would_take_wrongly_is_refused(refused, words, worker, kind):
    refused(2, words, worker, kind, sent=True)


def test_a_module_that_reads_its_childs_weight_is_refused(refused):
    refused(
        2, "`weight` is whole only inside this block's own forward", read_a_child, sent=True
    )


def a_block(group=None):
    return ShardedBlock(plain(), group)


def a_module_of_shards(group=None):
    module = plain()
    zero.shard_parameters(module)
    return module


def step_beside_a_layer(rank, world_size, make, of_its_own=False, apart=False):
    model = nn.Sequential(make(of_own(rank) if of_its_own else None), plain())
    optimizers = [SGD(part.parameters(), lr=0.1) for part in model] if apart else []
    model(torch.full((2, 3), rank + 1.0)).sum().backward()
    if apart:
        for parameter in model[1].parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    for optimizer in optimizers or [SGD(model.parameters(), lr=0.1)]:
        optimizer.step()


def of_own(rank):
    groups = [dist.new_group([i]) for i in range(dist.get_world_size())]
    return groups[rank]


def share_out_parts(rank, world_size, as_model):
    model = parallelize(new_block(), PLAN)
    ShardedModel(model) if as_model else ShardedOptimizer(model.parameters(), SGD, lr=0.1)


@pytest.mark.parametrize("as_model", [True, False])
def test_parts_of_a_layer_are_not_replaced_by_rank_0s(refused, as_model):
    refused(2, "is this rank's part of a layer", share_out_parts, as_model)


def step_an_old_optimizer(rank, world_size, kind):
    model = nn.Sequential(plain(), plain())
    optimizer = SGD(model.parameters(), lr=0.1)
    model = fully_sharded(model, list(model), kind=kind)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", [ShardedBlock, PrefetchingBlock])
def test_a_step_of_an_optimizer_that_was_made_before_is_refused(refused, world_size, kind):
    refused(world_size, "made before its model was", step_an_old_optimizer, kind, sent=True)


def step_a_shard_beside_a_layer(rank, world_size):
    flat, beside = zero.FlatParameters(plain()), plain()
    for parameter in [*flat.parameters, *beside.parameters()]:
        parameter.grad = torch.ones_like(parameter)
    flat.step(SGD([flat.shard, *beside.parameters()], lr=0.1))


@pytest.mark.parametrize("make", [a_block, a_module_of_shards])
def test_a_step_beside_a_layer_in_no_block_is_refused(refused, make):
    refused(2, "is in no block, beside shards", step_beside_a_layer, make, sent=True)


def step_flat_directly(rank, world_size, before):
    """A right step first, or none, then one that does not go through the flat parameters."""
    module = plain()
    flat = zero.FlatParameters(module)
    adam = Adam([flat.shard])
    if before:
        with_gradients(module)
        flat.step(adam)
    with_gradients(module)
    adam.step()


@pytest.mark.parametrize("before", [False, True])
def test_a_flat_shard_is_stepped_by_its_flat_parameters(refused, before):
    words = "call the `step` of the FlatParameters"
    refused(2, words, step_flat_directly, before, sent=before)


def step_views_of_flat(rank, world_size):
    module = plain()
    adam = Adam(module.parameters())
    zero.FlatParameters(module)
    with_gradients(module)
    adam.step()


def test_an_optimizer_of_the_views_of_a_flat_parameter_is_refused(refused):
    refused(2, "make it of the FlatParameters' shard", step_views_of_flat)


def clip_in_all(rank, world_size):
    pairs = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3))]
    model = ShardedModel(nn.Sequential(plain()), group=pairs[rank // 2])
    clip_shards(Adam(model.parameters()), 0.1)


def test_shards_are_clipped_over_the_group_that_shares_them(refused):
    refused(4, "shards over 2 ranks and a group of 4", clip_in_all, sent=True)


def test_a_step_of_a_flat_shard_beside_a_layer_is_refused(refused):
    refused(2, "is in no block, beside shards", step_a_shard_beside_a_layer, sent=True)


def test_who_averages_a_layer_beside_blocks_by_hand_gives_it_its_own_optimizer(ranks):
    ranks(2, step_beside_a_layer, a_block, apart=True)


def test_a_layer_beside_a_block_of_one_rank_is_no_other_than_the_block(ranks):
    ranks(2, step_beside_a_layer, a_block, of_its_own=True)


# What is right: the same as one process, however odd


def begin_apart(rank, world_size, stage):
    torch.manual_seed(rank)
    prepared = stages.prepare(stage, nn.Linear(3, 3))
    prepared.model(torch.ones(2, 3)).sum().backward()
    prepared.step()
    return stages.full_parameters(prepared.model)


@pytest.mark.parametrize("stage", range(4))
def test_all_start_from_rank_0s_values(ranks, stage):
    expected = begin_apart_alone()
    for found in ranks(2, begin_apart, stage).results:
        assert largest_difference([*found.values()], expected) < 1e-6


def begin_apart_beside(rank, world_size, stage):
    """What no step moves: a frozen layer's bias, and a buffer."""
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False))
    module.register_buffer("shift", torch.tensor(float(rank)))
    stages.prepare(stage, module)
    return module[1].bias, module.shift


@pytest.mark.parametrize("stage", range(3))
def test_frozen_layers_and_buffers_start_from_rank_0s_too(ranks, stage):
    first, second = ranks(2, begin_apart_beside, stage).results
    assert all(map(torch.equal, first, second)) and second[1] == 0


def begin_apart_alone():
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    optimizer = stages.ADAM(layer.parameters())
    layer(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return [p.detach() for p in layer.parameters()]


def freeze_a_block(rank, world_size, inside):
    model = ShardedModel(nn.Sequential(nn.Sequential(plain()), plain()))
    before = model.full_parameters()
    (model.module[0] if inside else model).requires_grad_(False)
    model(torch.ones(1, 3, requires_grad=True)).sum().backward()
    SGD(model.parameters(), lr=0.1).step()
    after = model.full_parameters()
    return [torch.equal(before[name], after[name]) for name in before]


@pytest.mark.parametrize("inside", [True, False])
def test_a_block_that_is_frozen_later_stays_as_it_is(ranks, inside):
    kept = [True, True, not inside, not inside]
    assert ranks(2, freeze_a_block, inside).results == [kept] * 2


def step_a_copy(rank, world_size):
    """In a group; then the checkpoint of the copy, which is sharded as the first is."""
    model = copy.deepcopy(ShardedModel(plain(), group=dist.new_group([0, 1])))
    optimizer = SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="are sharded"):
        save("never.pt", model, optimizer)
    return [*model.full_parameters().values()]


def test_a_deep_copy_in_a_group_is_sharded_as_well(ranks):
    layer = with_gradients(plain())
    expected = [p.detach() - 0.05 * p.grad for p in layer.parameters()]  # of 2 samples
    for found in ranks(2, step_a_copy).results:
        assert largest_difference(found, expected) < 1e-6


def clip_a_nan(rank, world_size):
    prepared = stages.prepare(1, module := plain(), partial(SGD, lr=0.1))
    clip_shards(prepared.optimizer, 1.0)
    with_gradients(module).bias.grad[0] = math.nan
    prepared.step()
    return sum(p.isnan().sum().item() for p in module.parameters())


def test_a_nan_makes_all_gradients_nan_as_torch_does(ranks):
    assert ranks(2, clip_a_nan).results == [12, 12]


class Odd(nn.Module):
    """An empty parameter, one number without a bias, a transposed weight, and buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.empty = nn.Parameter(torch.zeros(0))
        self.scale = nn.Linear(1, 1, bias=False)
        self.weight = nn.Parameter(torch.randn(3, 4).T)
        self.register_buffer("shift", torch.randn(4), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False, True, True]))

    def forward(self, x, factor=1.0, *, more=None):
        x = x @ self.weight.T + self.shift + self.empty.sum()
        x = torch.where(self.mask, x, factor * x)
        return self.scale(x[..., None])[..., 0][..., :3] + (0 if more is None else more["x"])


def batch(rank, world_size):
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).double()
    return x.chunk(world_size)[rank]


def gone_through(model, x, way):
    """A loss in a way in which people call a model."""
    if way == "keywords":
        return model(x, factor=2.0, more={"x": x}).square().mean()
    if way == "no_grad before":
        with torch.no_grad():
            model(x)
    if way == "an error before":
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 5).double())
    if way == "two forwards":
        return model(x).square().mean() + model(2 * x).square().mean()
    if way == "backward twice":
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        return loss
    if way == "the layer twice":
        return model(model(x)).square().mean()
    if way == "only the input's gradient before":
        x = x.clone().requires_grad_()
        torch.autograd.grad(model(x).square().mean(), x)
    return model(x).square().mean()


WAYS = (
    "plain",
    "keywords",
    "no_grad before",
    "an error before",
    "two forwards",
    "backward twice",
    "the layer twice",
    "only the input's gradient before",
)


def sharded_parameters(module):
    zero.shard_parameters(module)
    return module


def recomputed(module):
    zero.shard_parameters(module)
    zero.recompute(module)
    return module


KINDS = {
    "ShardedBlock": ShardedBlock,
    "PrefetchingBlock": PrefetchingBlock,
    "shard_parameters": sharded_parameters,
    "recompute": recomputed,
    "ShardedModel": ShardedModel,
}


def train_in(rank, world_size, kind, way):
    module = Odd().double()
    model = KINDS[kind](module) if kind else module
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        gone_through(model, batch(rank, world_size), way).backward()
        optimizer.step()
    return model(batch(0, 1)).detach()


def train_in_every_way(rank, world_size, kind):
    return {way: train_in(rank, world_size, kind, way) for way in WAYS}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_call_a_sharded_module_is_right(ranks, kind, world_size):
    expected = train_in_every_way(0, 1, None)
    for found in ranks(world_size, train_in_every_way, kind).results:
        far = {way: (found[way] - expected[way]).abs().max().item() for way in WAYS}
        assert max(far.values()) < 1e-12, far


def step_between_gathers(rank, world_size):
    """A gather that was begun before a step brings old weights, which nobody may use."""
    model = linked([PrefetchingBlock(plain().double()) for _ in range(2)])
    first, second = model
    first(batch(0, 1))  # begins the gather of the second
    with torch.no_grad():
        second.shard += 1
    return second(batch(0, 1)).detach()


def test_a_gather_that_is_older_than_a_step_is_not_used(ranks):
    layer = plain().double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 1
    expected = layer(batch(0, 1)).detach()
    assert largest_difference(ranks(2, step_between_gathers).results, [expected] * 2) < 1e-12


def step_flat(rank, world_size, make):
    """Two steps at stage 2 of a module of which a part may be frozen, tied or transposed."""
    module = make()
    flat = zero.FlatParameters(module)
    optimizer = SGD([flat.shard], lr=0.1, momentum=0.5)
    for _ in range(2):
        module(
            batch(rank, world_size).to(next(module.parameters()))
        ).square().mean().backward()
        flat.step(optimizer)
    return [*module.parameters()]


def odd_in_double():
    return Odd().double()


def frozen_in_double():
    torch.manual_seed(0)
    return frozen().double()


def tied_in_double():
    torch.manual_seed(0)
    return Tied().double()


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("make", [odd_in_double, frozen_in_double, tied_in_double])
def test_flat_parameters_take_the_steps_of_one_process(ranks, make, world_size):
    module = make()
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = SGD(trained, lr=0.1, momentum=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        module(batch(0, 1)).square().mean().backward()
        optimizer.step()
    found = ranks(world_size, step_flat, make).results
    assert largest_difference(found, [[*module.parameters()]] * world_size) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_stay_what_they_are(ranks, dtype):
    def step(rank, world_size):
        return step_flat(rank, world_size, lambda: plain().to(dtype))

    first, second = ranks(2, step).results
    assert {p.dtype for p in first} == {dtype}
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def step_in_groups(rank, world_size):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1, bias=False)).double()
    module[0].bias.requires_grad_(False)
    groups = [
        {"params": module[0].parameters(), "lr": 0.5},
        {"params": module[1].parameters()},
    ]
    if world_size > 1:
        optimizer = ShardedOptimizer(groups, SGD, lr=0.1)
    else:
        optimizer = SGD(groups, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        module(batch(rank, world_size)).square().mean().backward()
        optimizer.step()
    return [*module.parameters()]


def test_a_sharded_optimizer_takes_groups_and_more_ranks_than_parameters(ranks):
    found = ranks(3, step_in_groups).results
    assert largest_difference(found, [step_in_groups(0, 1)] * 3) < 1e-12


def step_from_another_start(rank, world_size):
    module = plain().double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += rank
    optimizer = ShardedOptimizer(module.parameters(), SGD, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        module(batch(rank, world_size)).square().mean().backward()
        optimizer.step()
    return [*module.parameters()]


def test_a_sharded_optimizer_starts_from_rank_0(ranks):
    module = plain().double()
    optimizer = SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        module(batch(0, 1)).square().mean().backward()
        optimizer.step()
    found = ranks(2, step_from_another_start).results
    assert largest_difference(found, [[*module.parameters()]] * 2) < 1e-12


def accumulate_then_step(rank, world_size):
    """Two micro-batches a step: their gradients add up before they are averaged."""
    module = plain().double()
    if world_size > 1:
        optimizer = ShardedOptimizer(module.parameters(), SGD, lr=0.1)
    else:
        optimizer = SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for factor in (1, 2):
            (factor * module(batch(rank, world_size))).square().mean().backward()
        optimizer.step()
    return [*module.parameters()]


def test_a_sharded_optimizer_takes_the_sum_of_micro_batches(ranks):
    found = ranks(2, accumulate_then_step).results
    assert largest_difference(found, [accumulate_then_step(0, 1)] * 2) < 1e-12


class Tuples(nn.Module):
    """Layers that return tuples, take keywords, or keep a list of parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.recurrent = nn.LSTM(3, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.scales = nn.ParameterList([torch.ones(4), torch.ones(4)])

    def forward(self, x):
        y, _ = self.recurrent(x)
        y, _ = self.attention(y, y, value=y, need_weights=False)
        return y * self.scales[0] + self.scales[1]


def train_tuples(rank, world_size):
    x = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(1)).double()
    module = nn.Sequential(Tuples(), nn.Linear(4, 1)).double()
    model = ShardedModel(module) if world_size > 1 else module
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x.chunk(world_size)[rank]).square().mean().backward()
        optimizer.step()
    return model(x).detach()


def test_a_sharded_model_takes_layers_with_tuples_keywords_and_lists(ranks):
    expected = train_tuples(0, 1)
    assert largest_difference(ranks(2, train_tuples).results, [expected] * 2) < 1e-12


@pytest.mark.parametrize("worker", [save_a_block, save_a_flat])
def test_rank_0_does_not_save_its_shard_as_the_whole(refused, worker):
    refused(2, "rank 0 would write its own part only", worker, sent=True)
