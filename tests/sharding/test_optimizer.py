"""ZeRO 1: every parameter has an owner, and the state is that of one process."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.sharding import training
from mgpu_tutorial.sharding.optimizer import ShardedOptimizer, share_out
from tests.sharding.reference import new_model, values


@given(some.lists(some.integers(1, 9), max_size=8), some.integers(1, 4))
def test_the_largest_parameter_goes_to_the_rank_that_has_least(sizes, ranks):
    parameters = [nn.Parameter(torch.ones(size)) for size in sizes]
    held, expected = [0] * ranks, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        expected[i] = min(range(ranks), key=lambda rank: (held[rank], rank))
        held[expected[i]] += sizes[i]
    owner = share_out(parameters, ranks)
    assert [owner[p] for p in parameters] == expected


def step_all_kinds(rank, world_size):
    """A step of large, small, short and frozen parameters; their values by name."""
    made = {
        "large": nn.Parameter(torch.zeros(600, 500)),
        "small": nn.Parameter(torch.zeros(3, 2)),
        "turned": nn.Parameter(torch.zeros(4, 5).T),  # its numbers do not lie in a row
        "last": nn.Parameter(torch.zeros(1)),
        "short": nn.Parameter(torch.zeros(7, dtype=torch.bfloat16)),
        "frozen": nn.Parameter(torch.zeros(2), requires_grad=False),
    }
    optimizer = ShardedOptimizer(made.values(), torch.optim.SGD, lr=1.0)
    for number, (name, parameter) in enumerate(made.items(), 1):
        if name not in ("frozen", "last"):  # nobody used the last one
            parameter.grad = torch.full_like(parameter, number * (rank + 1.0))
    optimizer.average_gradients()
    optimizer.step()
    return {name: parameter.detach().unique().tolist() for name, parameter in made.items()}


def test_parameters_of_one_owner_and_dtype_travel_together(ranks):
    report = ranks(2, step_all_kinds, trace=True)
    # the mean of 1 and 2 is 1.5 times the number of the parameter, and the rate is 1
    means = {"large": [-1.5], "small": [-3.0], "turned": [-4.5], "last": [0.0]}
    means |= {"short": [-7.5], "frozen": [0.0]}
    assert report.results == [means] * 2
    # rank 0 owns the large one alone; rank 1 those that are left, of two dtypes
    sent = [(e.op, e.nbytes) for e in report.events if e.rank == 1 and e.kind == "collective"]
    sizes = [600 * 500 * 4, 27 * 4, 7 * 2]
    assert sorted(sent) == sorted((op, s) for op in ("reduce", "broadcast") for s in sizes)


# State


def train_groups(rank, world_size, sharded, steps, start=None):
    """Two groups and a scheduler; the model's values, the whole state, how much is here."""
    model = new_model()
    embeddings = [model.token.weight, model.position.weight]
    rest = [*model.blocks.parameters(), *model.norm.parameters()]
    groups = [{"params": embeddings, "lr": 0.02}, {"params": rest}]
    given = (groups, torch.optim.AdamW) if sharded else (groups,)
    new = ShardedOptimizer if sharded else torch.optim.AdamW
    optimizer = new(*given, lr=0.01, amsgrad=True)
    if start:
        model.load_state_dict(start[0], strict=False)
        optimizer.load_state_dict(start[1])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for step in steps:
        optimizer.zero_grad()
        training.loss_of(model, step, rank, world_size).backward()
        training.average_gradients(model)
        optimizer.step()
        scheduler.step()
    return values(model), optimizer.state_dict(), len(optimizer.state)


def same(found, expected):
    assert found[1]["param_groups"] == expected[1]["param_groups"]
    assert list(found[1]["state"]) == list(expected[1]["state"])
    assert largest_difference(found[1]["state"], expected[1]["state"]) < 1e-12
    assert largest_difference(found[0], expected[0]) < 1e-12


@pytest.mark.parametrize(("world_size", "sharded"), [(1, False), (3, True)])
def test_a_gathered_state_is_that_of_one_process_and_others_go_on(ranks, world_size, sharded):
    (alone,) = ranks(1, train_groups, False, range(3)).results
    (later,) = ranks(1, train_groups, False, range(3, 5), alone[:2]).results
    saved = ranks(2, train_groups, True, range(3)).results
    held = [here for _, _, here in saved]
    assert sum(held) == alone[2] == 28 and all(held)
    for found in saved:
        same(found, alone)
    for found in ranks(world_size, train_groups, sharded, range(3, 5), saved[0][:2]).results:
        same(found, later)
