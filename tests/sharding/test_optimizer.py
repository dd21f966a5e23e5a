"""ZeRO 1: every parameter has an owner, and the state is that of one process."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.sharding import training
from mgpu_tutorial.sharding.optimizer import PARCEL, ShardedOptimizer, share_out
from tests.sharding.reference import loss_of, new_model, values


@given(some.lists(some.integers(1, 9), max_size=8), some.integers(1, 4))
def test_the_largest_parameter_goes_to_the_rank_that_has_least(sizes, ranks):
    parameters = [nn.Parameter(torch.ones(size)) for size in sizes]
    held, expected = [0] * ranks, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        expected[i] = min(range(ranks), key=lambda rank: (held[rank], rank))
        held[expected[i]] += sizes[i]
    owner = share_out(parameters, ranks)
    assert [owner[p] for p in parameters] == expected


# Messages


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
    expected = [("reduce", size) for size in sizes] + [("broadcast", size) for size in sizes]
    assert sorted(sent) == sorted(expected)


def step_sizes(rank, world_size, sizes):
    """One step of parameters with so many float32 numbers."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    optimizer = ShardedOptimizer(parameters, torch.optim.SGD, lr=1.0)
    optimizer.step()


@pytest.mark.parametrize(
    ("sizes", "sent"),
    [
        ([1, 2, 3], [6]),
        ([PARCEL // 4 - 1, 2, 1], [PARCEL // 4 + 1, 1]),
        ([PARCEL // 4 - 2, 1, 1, 5], [PARCEL // 4, 5]),
        ([PARCEL // 4 - 3, 1, 1], [PARCEL // 4 - 1]),
    ],
)
def test_a_call_sends_what_fills_a_parcel(ranks, sizes, sent):
    report = ranks(1, step_sizes, sizes, trace=True)
    calls = [e.nbytes for e in report.events if e.op == "broadcast"]
    assert sorted(calls) == sorted(4 * size for size in sent)


def step_with_a_closure(rank, world_size):
    """The closure's loss comes back, and gradients are on inside it."""
    weight = nn.Parameter(torch.tensor([3.0]))
    optimizer = ShardedOptimizer([weight], torch.optim.SGD, lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    return optimizer.step(closure).item(), weight.item()


def test_a_closure_is_called_with_gradients(ranks):
    assert ranks(2, step_with_a_closure).results == [(9.0, 0.0)] * 2


# State


def groups_of(model):
    return [
        {"params": [model.token.weight, model.position.weight], "lr": 0.02},
        {"params": [*model.blocks.parameters(), *model.norm.parameters()]},
    ]


def train_groups(rank, world_size, sharded, steps, start=None):
    """Two groups and a scheduler; the model's values, the whole state, how much is here."""
    model = new_model()
    settings = {"lr": 0.01, "amsgrad": True}
    if sharded:
        optimizer = ShardedOptimizer(groups_of(model), torch.optim.AdamW, **settings)
    else:
        optimizer = torch.optim.AdamW(groups_of(model), **settings)
    if start:
        model.load_state_dict(start[0], strict=False)
        optimizer.load_state_dict(start[1])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        training.average_gradients(model)
        optimizer.step()
        scheduler.step()
    return values(model), optimizer.state_dict(), len(optimizer.state)


def same_state(found, expected):
    assert found["param_groups"] == expected["param_groups"]
    assert list(found["state"]) == list(expected["state"])
    assert largest_difference(found["state"], expected["state"]) < 1e-12


def test_a_gathered_state_is_that_of_one_process(ranks):
    (alone,) = ranks(1, train_groups, False, range(3)).results
    report = ranks(2, train_groups, True, range(3))
    held = [here for _, _, here in report.results]
    assert sum(held) == alone[2] == 28 and all(held)
    for model, state, _ in report.results:
        same_state(state, alone[1])
        assert largest_difference(model, alone[0]) < 1e-12
        assert state["param_groups"][0]["lr"] == 0.02 / 8  # three steps of the scheduler
        assert state["param_groups"][1]["amsgrad"] is True


@pytest.mark.parametrize(("world_size", "sharded"), [(1, False), (3, True)])
def test_other_ranks_and_a_plain_optimizer_go_on_from_it(ranks, world_size, sharded):
    (alone,) = ranks(1, train_groups, False, range(3)).results
    (expected,) = ranks(1, train_groups, False, range(3, 5), alone[:2]).results
    saved = ranks(2, train_groups, True, range(3)).results[0][:2]
    for found in ranks(world_size, train_groups, sharded, range(3, 5), saved).results:
        same_state(found[1], expected[1])
        assert largest_difference(found[0], expected[0]) < 1e-12
