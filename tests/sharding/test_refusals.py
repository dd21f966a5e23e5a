"""What a stage can't do it refuses; what it does, however odd, is what one process does."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD

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


def two_dtypes(*_):
    return nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3).double())


def plain(*_):
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def with_gradients(module):
    module(torch.ones(2, 3)).sum().backward()
    return module


def shard_a_block(rank, world_size, make):
    ShardedBlock(make())


def shard_with(rank, world_size, make, names):
    """A model with the blocks of these names."""
    module = make()
    fully_sharded(module, [module.get_submodule(name) for name in names])


def share_between_blocks(rank, world_size):
    module = Tied()
    ShardedBlock(module.one)
    ShardedBlock(module.two)


def prepare_stage(rank, world_size, stage):
    stages.prepare(stage, plain())


def clip_by(rank, world_size, max_norm):
    clip_shards(SGD(plain().parameters(), lr=0.1), max_norm)


def share_24_samples(rank, world_size):
    stages.loss_of(stages.new_tower(), 0, rank, world_size)


def shard_a_block_again(rank, world_size):
    ShardedBlock(ShardedBlock(plain()))


REFUSED = {
    "a block of a block": ("ShardedBlock", shard_a_block_again),
    "tied across two blocks": ("`weight`", share_between_blocks),
    "tied across chosen blocks": ("`weight`", shard_with, tied, ["one", "two"]),
    "tied to the root": ("`one.weight`", shard_with, tied, ["two"]),
    "frozen in a block": ("`1.weight`", shard_a_block, frozen),
    "frozen in a chosen block": ("`weight`", shard_with, frozen, ["1"]),
    "a frozen layer in no block": ("`1.weight`", shard_with, frozen, []),
    "two dtypes in a block": ("`1.weight`", shard_a_block, two_dtypes),
    "stage 4": ("stage", prepare_stage, 4),
    "clipping by nan": ("nan", clip_by, math.nan),
    "clipping by words": ("'1.0'", clip_by, "1.0"),
    "clipping by nothing": ("0", clip_by, 0),
}


@pytest.mark.parametrize("case", REFUSED)
def test_every_rank_refuses_it_before_anything_is_sent(refused, case):
    name, *call = REFUSED[case]
    refused(2, ValueError(name), *call)


def test_unequal_parts_are_refused(refused):
    refused(5, ValueError("24", "5"), share_24_samples)


def keep_the_gradients(rank, world_size, owner):
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


@pytest.mark.parametrize("owner", [None, [0, 1]])
def test_gradients_of_the_last_step_are_refused(refused, owner):
    refused(2, RuntimeError("averaged"), keep_the_gradients, owner, sent=True)


def step_in_between(rank, world_size, kind):
    block = kind(plain())
    loss = block(torch.ones(2, 3, requires_grad=True)).square().sum()
    with torch.no_grad():
        block.shard += 1
    loss.backward()


@pytest.mark.parametrize("kind", [ShardedBlock, PrefetchingBlock])
def test_a_step_between_forward_and_backward_is_refused(refused, kind):
    refused(2, RuntimeError("forward", "backward"), step_in_between, kind, sent=True)


def save_as_if_whole(rank, world_size, make):
    module, parameters = make()
    save("never.pt", module, SGD(parameters, lr=0.1))


def a_block():
    block = ShardedBlock(plain())
    return block, block.parameters()


def flat_parameters():
    module = plain()
    return module, [zero.FlatParameters(module).shard]


@pytest.mark.parametrize("make", [a_block, flat_parameters])
def test_rank_0_does_not_save_its_shard_as_the_whole(refused, make):
    refused(2, ValueError("save_shards"), save_as_if_whole, make, sent=True)


def wrap_traced(rank, world_size, wrap):
    wrap(nn.Sequential(plain(), nn.Linear(3, 3)))


def by_owner(module):
    ShardedOptimizer(module.parameters(), SGD, lr=0.1)


def by_layers(module):
    fully_sharded(module, list(module))


@pytest.mark.parametrize(
    "wrap, calls", [(by_owner, ["broadcast"] * 4), (zero.FlatParameters, []), (by_layers, [])]
)
def test_sharding_sends_the_start_and_no_more(ranks, wrap, calls):
    report = ranks(2, wrap_traced, wrap, trace=True)
    assert [event.op for event in report.events if event.rank == 0] == calls


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
