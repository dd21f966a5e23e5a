"""Each stage takes the steps of one process, and the classes do what other suites expect."""

from functools import partial
from inspect import signature

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.sharding import stages
from mgpu_tutorial.sharding.stages import ShardedModel, ShardedOptimizer
from mgpu_tutorial.shared.models import SmallTransformer


def new_model(dtype=torch.float64, frozen=False):
    """Sizes that no number of ranks divides: a norm has 5 numbers, the embedding 335."""
    torch.manual_seed(0)
    model = SmallTransformer(67, width=5, heads=1, depth=2, tied=False).to(dtype)
    if frozen:
        model.position.weight.requires_grad_(False)
        model.blocks[0].mlp.up.weight.requires_grad_(False)
    return model


def loss_of(model, step, rank, world_size):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(67, (12, 8), generator=generator).chunk(world_size)[rank]
    return cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


STEEP = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.3)  # Adam would forget a factor


def train(rank, world_size, stage, **settings):
    prepared = stages.prepare(stage, new_model(**settings), STEEP)
    with torch.no_grad():
        loss_of(prepared.model, 0, rank, world_size)  # leaves nothing behind
    for number in range(3):
        prepared.model.zero_grad()
        loss_of(prepared.model, number, rank, world_size).backward()
        prepared.step()
    return stages.full_parameters(prepared.model)


# A frozen parameter is for stage 1 alone: the others take what trains.
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    "stage, frozen", [(1, True), *((stage, False) for stage in range(4))]
)
def test_steps_are_those_of_one_process(ranks, stage, frozen, world_size):
    model = new_model(frozen=frozen)
    optimizer = STEEP(p for p in model.parameters() if p.requires_grad)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, 0, 1).backward()
        optimizer.step()
    found = ranks(world_size, train, stage, frozen=frozen).results
    assert largest_difference(found, [dict(model.named_parameters())] * world_size) < 1e-12


# What other programs rely on


def start_apart(rank, world_size):
    """Only what rank 0 has counts, buffers too."""
    model = new_model()
    model.register_buffer("seen", torch.tensor(float(rank)), persistent=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += rank
    return ShardedModel(model).full_parameters() | {"seen": model.seen}


def test_a_sharded_model_starts_from_rank_0(ranks):
    results = ranks(2, start_apart).results
    assert [found.pop("seen").item() for found in results] == [0, 0]
    expected = dict(new_model().named_parameters())
    assert largest_difference(results, [expected] * 2) == 0


def test_a_single_layer_keeps_its_names(ranks):
    (names,) = ranks(1, lambda *_: [*ShardedModel(nn.Linear(1, 1)).full_parameters()]).results
    assert names == ["weight", "bias"]


def test_what_is_left_in_the_module_is_the_same_on_every_rank(ranks):
    def left(rank, world_size):
        model = ShardedModel(new_model())
        return [*model.module.parameters()], [name for name, _ in model.named_parameters()]

    for in_module, names in ranks(2, left).results:
        assert in_module == [] and names == [f"shards.{i}" for i in range(len(names))] != []


def train_short(rank, world_size):
    model = ShardedModel(new_model(torch.float32), compute_dtype=torch.bfloat16)
    loss = loss_of(model, 0, rank, world_size)
    loss.backward()
    model.finish_gradient_synchronization()
    kept = {t.dtype for p in model.parameters() for t in (loss, p, p.grad)}
    return kept, sum(p.grad.double().square().sum() for p in model.parameters())


def test_a_short_dtype_travels_and_a_long_one_stays(ranks):
    report = ranks(2, train_short, trace=True)
    assert all(kept == {torch.float32} for kept, _ in report.results)
    model = new_model()
    loss_of(model, 0, 0, 1).backward()
    norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt().item()
    found = sum(square for _, square in report.results).sqrt().item()
    assert found == pytest.approx(norm, rel=0.03)
    block = 4 * 5 + 4 * 25 + 100 + 20 + 100 + 5  # numbers, one more to make two shards
    gathers = [e.nbytes for e in report.events if e.op == "all_gather_single" and not e.rank]
    assert gathers.count(2 * (block + 1)) == 4  # two blocks, twice


def test_other_suites_call_a_sharded_optimizer_like_this():
    signature(ShardedOptimizer).bind([], torch.optim.AdamW, lr=0.1, betas=(0.9, 0.99))
    assert {"zero_grad", "step"} <= set(dir(ShardedOptimizer))


def train_flat(rank, world_size):
    model = new_model()
    optimizer = stages.FlatOptimizer(model.parameters(), SGD, lr=0.1, momentum=0.9)
    for number in range(3):
        loss_of(model, number, rank, world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def test_stage_2_in_the_form_of_an_optimizer_takes_the_steps_of_one_process(ranks):
    model = new_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, 0, 1).backward()
        optimizer.step()
    found = ranks(3, train_flat).results
    assert largest_difference(found, [list(model.parameters())] * 3) < 1e-12
