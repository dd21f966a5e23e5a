"""Stage 3 of any module, and every stage in a group of ranks: the steps of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear
from torch.optim import SGD

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.sharding import zero
from mgpu_tutorial.sharding.blocks import (
    PrefetchingBlock,
    ShardedBlock,
    fully_sharded,
    linked,
)
from mgpu_tutorial.sharding.stages import ShardedModel, ShardedOptimizer
from mgpu_tutorial.shared.models import SmallTransformer


class Reading(nn.Module):
    """Reads the weight of a layer of its own, uses one layer twice, and one not in a list."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"one": nn.Linear(4, 4), "act": nn.GELU()})
        self.read = nn.Linear(4, 4, bias=False)
        self.again = self.read
        self.last = nn.LayerNorm(4)

    def forward(self, x):
        x = self.layers["act"](self.layers["one"](x))
        return self.last(self.again(linear(x, self.read.weight)))


def transformer(tied):
    torch.manual_seed(0)
    return SmallTransformer(4, width=4, heads=2, depth=2, tied=tied).double()


def sequential():
    torch.manual_seed(0)
    layers = nn.Linear(4, 5), nn.Sequential(nn.Tanh(), nn.Linear(5, 5)), nn.Linear(5, 4)
    return nn.Sequential(*layers).double()


def reading():
    torch.manual_seed(0)
    return Reading().double()


def one_layer_twice():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 4)).double()


# How a model is made, and by their names its blocks; None stands for those that it chooses
MODELS = {
    "a transformer": (lambda: transformer(False), ["blocks.0", "blocks.1"]),
    "a transformer, tied": (lambda: transformer(True), ["blocks.0", "blocks.1"]),
    "tied, blocks chosen": (lambda: transformer(True), None),
    "blocks in blocks": (lambda: transformer(True), ["blocks.0.mlp.up", "blocks.0.mlp"]),
    "a norm, and the head": (lambda: transformer(False), ["norm", "head"]),
    "a Sequential": (sequential, None),
    "a Sequential, a layer in no block": (sequential, ["0", "2"]),
    "only the root": (sequential, []),
    "one that reads a weight": (reading, None),
    "a layer twice": (one_layer_twice, None),
    "a layer twice, the root": (one_layer_twice, []),
}


def loss_of(model, number, rank, world_size):
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(4, (6, 4), generator=generator).chunk(world_size)[rank]
    x = tokens if isinstance(getattr(model, "token", 0), nn.Module) else tokens.double()
    output = model(x)
    if x is tokens:
        return cross_entropy(output.flatten(0, 1), tokens.flatten())
    return output.square().mean()


def whole(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train(rank, world_size, name, by):
    make, names = MODELS[name]
    model = make()
    blocks = None if names is None else [model.get_submodule(path) for path in names]
    if by == "class":
        model = ShardedModel(model, blocks=blocks)
        model.token = getattr(model.module, "token", 0)
    elif by:
        model = fully_sharded(model, blocks)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.1)
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model, number, rank, world_size).backward()
        optimizer.step()
    losses = [loss_of(model, number, 0, 1).item() for number in range(3)]
    return losses, model.full_parameters() if by == "class" else {}


def train_each(rank, world_size, by, names):
    return {name: train(rank, world_size, name, by) for name in names}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("by", ["class", "function"])
def test_any_module_takes_the_steps_of_one_process(ranks, by, world_size):
    names = [name for name in MODELS if by == "class" or MODELS[name][1] is not None]
    expected = train_each(0, 1, "", names)
    for found in ranks(world_size, train_each, by, names).results:
        far = {name: largest_difference(found[name][0], expected[name][0]) for name in names}
        assert max(far.values()) < 1e-12, far


def full_names(rank, world_size, name):
    return [*ShardedModel(MODELS[name][0]()).full_parameters()]


@pytest.mark.parametrize("name", ["tied, blocks chosen", "a Sequential", "a layer twice"])
def test_full_parameters_have_the_names_of_the_module(ranks, name):
    expected = dict(MODELS[name][0]().named_parameters())
    (found,) = ranks(1, full_names, name).results
    assert sorted(found) == sorted(expected)


class Lazy(nn.Module):
    """One unit that no forward uses, and in another a parameter that none uses."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
        self.extra = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.used(x)


def leave_unused(rank, world_size):
    module = Lazy()
    model = ShardedModel(module, blocks=[module.unused])
    optimizer = SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    model(torch.zeros(3, 2)).sum().backward()
    gradients = [shard.grad is None for shard in model.shards]
    optimizer.step()
    return gradients, model.full_parameters()["extra"]


def test_an_unused_block_has_no_gradient_and_an_unused_parameter_of_a_block_zeros(ranks):
    for gradients, extra in ranks(2, leave_unused).results:
        assert gradients == [False, True]  # the root's, and that of the unused block
        assert extra.tolist() == [0.5] * 4  # which weight decay has moved


# In a group of ranks


def in_a_pair(rank, world_size, stage):
    """Ranks 0 and 2 train one network, ranks 1 and 3 another one, on other samples."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])] if world_size > 1 else [None]
    number = rank % 2 if world_size > 1 else stage
    group = pairs[number if world_size > 1 else 0]
    torch.manual_seed(number)
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    x = x.chunk(2)[rank // 2] if world_size > 1 else x
    model, step = module, None
    if world_size == 1:
        optimizer = SGD(module.parameters(), lr=0.1)
    elif stage == "sharded_step":
        parameters = list(module.parameters())
        owner = [0, 1, 0, 1]
        mine = [p for p, who in zip(parameters, owner, strict=True) if who == rank // 2]
        optimizer = SGD(mine, lr=0.1)
        step = lambda: zero.sharded_step(parameters, owner, optimizer, group)  # noqa: E731
    elif stage == "ShardedOptimizer":
        optimizer = ShardedOptimizer(module.parameters(), SGD, lr=0.1, group=group)
    elif stage == "FlatParameters":
        flat = zero.FlatParameters(module, group)
        optimizer = SGD([flat.shard], lr=0.1)
        step = lambda: flat.step(optimizer)  # noqa: E731
    else:
        if stage == "ShardedModel":
            model = ShardedModel(module, group=group)
        elif stage == "PrefetchingBlock":
            blocks = module[0], nn.Sequential(*module[1:])
            model = linked([PrefetchingBlock(block, group) for block in blocks])
        else:
            model = fully_sharded(module, [module[2]], group)
        optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        module.zero_grad()
        model.zero_grad()
        model(x).square().mean().backward()
        (step or optimizer.step)()
    return model(torch.ones(1, 4).double()).detach()


STAGES = (
    "sharded_step",
    "ShardedOptimizer",
    "FlatParameters",
    "fully_sharded",
    "PrefetchingBlock",
    "ShardedModel",
)


def all_in_pairs(rank, world_size):
    return {stage: in_a_pair(rank, world_size, stage) for stage in STAGES}


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_shards_over_a_group(ranks, stage):
    expected = [in_a_pair(0, 1, number) for number in (0, 1)]
    found = [of_rank[stage] for of_rank in ranks(4, all_in_pairs).results]
    assert largest_difference(found, expected * 2) < 1e-12


def shard_over_others(rank, world_size, kind):
    others = [dist.new_group([0]), dist.new_group([1])][1 - rank]
    layer = nn.Linear(2, 2)
    if kind == "optimizer":
        ShardedOptimizer(layer.parameters(), SGD, group=others)
    elif kind == "flat":
        zero.FlatParameters(layer, others)
    elif kind == "block":
        ShardedBlock(layer, others)
    else:
        ShardedModel(layer, group=others)


@pytest.mark.parametrize("kind", ["optimizer", "flat", "block", "model"])
def test_a_group_of_other_ranks_is_refused(refused, kind):
    refused(2, ValueError("group"), shard_over_others, kind, sent=True)
