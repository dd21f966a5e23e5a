"""Each stage takes the steps of one process, and its gradients are those of one process."""

from functools import partial
from inspect import signature

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.sharding import figures, stages
from mgpu_tutorial.sharding.blocks import ShardedBlock
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


def values(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def train_alone(model, optimizer, steps=3):
    """One process on whole batches; the gradients of the last step, and the parameters."""
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, 0, 1).backward()
        optimizer.step()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return gradients, values(model)


# Gradients


def gradients_of(rank, world_size, stage):
    """This rank's part of the mean gradient: of what it owns, or of its flat shards."""
    model = new_model()
    names = {p: name for name, p in model.named_parameters()}
    shapes = [(name, p.shape) for name, p in model.named_parameters()]
    prepared = stages.prepare(stage, model, partial(SGD, lr=0.0))
    loss_of(prepared.model, 0, rank, world_size).backward()
    prepared.step()
    if stage == 1:
        return {names[p]: p.grad for p in prepared.optimizer.param_groups[0]["params"]}
    if stage == 2:
        assert all(p.grad is None for p in model.parameters())
        return [(prepared.optimizer.param_groups[0]["params"][0].grad, shapes)]
    found = []
    for path, block in model.named_modules():
        if isinstance(block, ShardedBlock):
            named = [(f"{path}.{name}", shape) for name, shape in block.shapes.items()]
            found.append((block.shard.grad, named))
    return found


def put_together(parts):
    """The whole gradients by name, from the shards of all ranks."""
    whole = {}
    for shards in zip(*parts, strict=True):
        flat = torch.cat([gradient for gradient, _ in shards])
        for name, shape in shards[0][1]:
            whole[name], flat = flat[: shape.numel()].view(shape), flat[shape.numel() :]
    return whole


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_gradient_is_that_of_one_process(ranks, stage, world_size):
    model = new_model()
    expected, _ = train_alone(model, SGD(model.parameters(), lr=0.0), steps=1)
    parts = ranks(world_size, gradients_of, stage).results
    owned = {name: g for part in parts for name, g in part.items()} if stage == 1 else None
    assert largest_difference(owned or put_together(parts), expected) < 1e-14


# Steps


DECAY = partial(AdamW, lr=0.01, weight_decay=0.3)


def train(rank, world_size, stage, **settings):
    prepared = stages.prepare(stage, new_model(**settings), DECAY)
    with torch.no_grad():
        loss_of(prepared.model, 0, rank, world_size)  # leaves nothing behind
    for number in range(3):
        prepared.model.zero_grad()
        loss_of(prepared.model, number, rank, world_size).backward()
        prepared.step()
    return stages.full_parameters(prepared.model)


@pytest.mark.parametrize("stage", range(4))
def test_steps_are_those_of_one_process(ranks, stage):
    model = new_model()
    _, expected = train_alone(model, DECAY(model.parameters()))
    found = ranks(3, train, stage).results
    assert largest_difference(found, [expected] * 3) < 1e-12


def test_frozen_parameters_stay_as_they_are(ranks):
    model = new_model(frozen=True)
    _, expected = train_alone(model, DECAY(p for p in model.parameters() if p.requires_grad))
    found = ranks(3, train, 1, frozen=True).results
    assert largest_difference(found, [expected] * 3) < 1e-12


@pytest.mark.parametrize("stage", range(4))
def test_a_rank_holds_what_the_formula_says(ranks, stage):
    whole = [4 * 132_352, 4 * 132_352, 8 * 132_352]  # of float32, in a step of Adam
    sharded = [stage >= 3, stage >= 2, stage >= 1]
    expected = [n // 4 if cut else n for n, cut in zip(whole, sharded, strict=True)]
    results = ranks(4, figures.train, range(4)).results
    assert [result[stage][0][-1] for result in results] == [expected] * 4


# What other programs rely on


def start_apart(rank, world_size):
    """Only what rank 0 has counts, buffers too."""
    model = new_model()
    model.register_buffer("seen", torch.tensor(float(rank)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += rank
    return ShardedModel(model).full_parameters() | {"seen": model.seen}


def test_a_sharded_model_starts_from_rank_0(ranks):
    expected = values(new_model()) | {"seen": torch.tensor(0.0)}
    assert largest_difference(ranks(2, start_apart).results, [expected] * 2) == 0


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
    gradients, _ = train_alone(model, SGD(model.parameters(), lr=0.0), steps=1)
    norm = sum(g.square().sum() for g in gradients.values()).sqrt().item()
    found = sum(square for _, square in report.results).sqrt().item()
    assert found == pytest.approx(norm, rel=0.03)
    block = 4 * 5 + 4 * 25 + 100 + 20 + 100 + 5  # numbers, one more to make two shards
    gathers = [e.nbytes for e in report.events if e.op == "all_gather_single" and not e.rank]
    assert gathers.count(2 * (block + 1)) == 4  # two blocks, twice


@pytest.mark.parametrize("kind", ["frozen", "shared"])
def test_what_it_would_train_wrongly_is_refused(ranks, kind):
    one = nn.Linear(3, 3).requires_grad_(kind == "shared")
    model = nn.Sequential(one, one if kind == "shared" else nn.Linear(3, 3))
    with pytest.raises(RankFailed, match="frozen or shared by two layers"):
        ranks(1, lambda *_: ShardedModel(model))


def test_other_suites_call_these_by_name():
    signature(ShardedOptimizer).bind([], torch.optim.AdamW, lr=0.1, betas=(0.9, 0.99))
    signature(ShardedModel).bind(nn.Linear(1, 1), compute_dtype=torch.bfloat16)
    assert {"finish_gradient_synchronization", "full_parameters"} <= set(dir(ShardedModel))
    assert {"zero_grad", "step"} <= set(dir(ShardedOptimizer))
