"""A misuse of a wrapper is named on every rank; nobody waits for anybody."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.sharding.gradients import ShardedGradients
from mgpu_tutorial.sharding.model import ShardedModel
from mgpu_tutorial.sharding.optimizer import ShardedOptimizer
from mgpu_tutorial.shared.models import SmallTransformer
from tests.sharding.reference import loss_of, new_model


def refusals(rank, world_size, misuses, *wrapper):
    """What each misuse raises on this rank, one after the other."""
    said = []
    for misuse in misuses:
        try:
            misuse(rank, *wrapper)
        except (ValueError, TypeError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


BY_BOTH = {  # what both wrappers say, and of what
    "ValueError: rank 1 has ": lambda rank, wrap: wrap(SmallTransformer(depth=2 + rank)),
    "ValueError: there is a {} inside at '1': wrap a module once": lambda _, wrap: (
        ShardedModel(nn.Sequential(nn.Linear(2, 2), wrap(nn.Linear(2, 2))))
    ),
    "ValueError: there is a {} inside: wrap a module once": lambda _, wrap: ShardedGradients(
        wrap(nn.Linear(2, 2))
    ),
    "ValueError: there is a DistributedDataParallel inside at '0'": lambda _, wrap: wrap(
        nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)))
    ),
    "ValueError: a sharded module averages its gradients by itself": lambda _, wrap: (
        DistributedDataParallel(wrap(nn.Linear(2, 2)))
    ),
    "ValueError: no parameter requires a gradient": lambda _, wrap: wrap(
        nn.Linear(2, 2).requires_grad_(False)
    ),
}


@pytest.mark.parametrize("wrapper", [ShardedGradients, ShardedModel])
def test_a_wrapper_refuses_on_every_rank(ranks, wrapper):
    for said in ranks(2, refusals, list(BY_BOTH.values()), wrapper).results:
        for expected, found in zip(BY_BOTH, said, strict=True):
            assert found.startswith(expected.format(wrapper.__name__))


def load_a_state_of_other_parameters(_):
    optimizer = ShardedOptimizer(new_model().parameters(), torch.optim.SGD, lr=0.1)
    other = ShardedOptimizer([nn.Parameter(torch.ones(1))], torch.optim.SGD, lr=0.1)
    optimizer.load_state_dict(other.state_dict())


def load_unknown_names(_):
    model = ShardedModel(new_model())
    whole = model.full_parameters()
    whole["other"] = whole.pop("norm.bias")
    model.load_full_parameters(whole)


def one_forward_and_two_backwards(_):
    model = ShardedModel(new_model())
    with torch.no_grad():
        loss_of(model, 0)  # owes no backward
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    loss.backward()


def two_backwards_without_a_finish(_):
    model = ShardedGradients(new_model())
    for step in (0, 1):
        loss_of(model, step).backward()


def put_other_memory(_):
    model = ShardedGradients(new_model())
    model.module.norm.weight.data = torch.ones(5, dtype=torch.float64)
    loss_of(model, 0).backward()
    model.finish_gradient_synchronization()
    model.gather_parameters()


def set_a_parameter_anew(_):
    model = ShardedModel(new_model())
    model.module.norm.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))
    loss_of(model, 0)


def change_a_gathered_parameter(_):
    model = ShardedModel(new_model())
    model.module.norm.register_forward_pre_hook(lambda norm, _: norm.weight.zero_())
    with torch.no_grad():
        loss_of(model, 0)


BY_ONE = {
    "ValueError: units must be submodules of the module, got [Linear(": lambda _: (
        ShardedModel(new_model(), units=[nn.Linear(2, 2)])
    ),
    "ValueError: rank 1 has other units or another compute_dtype than rank 0": lambda rank: (
        ShardedModel(new_model(), units=[] if rank == 1 else None)
    ),
    "ValueError: rank 1 has other units or another compute_dtype": lambda rank: ShardedModel(
        new_model(), compute_dtype=torch.bfloat16 if rank == 1 else None
    ),
    "TypeError: optimizer_class must be a class of torch.optim, got 'Adam'": lambda _: (
        ShardedOptimizer([nn.Parameter(torch.ones(1))], "Adam")
    ),
    "ValueError: the state is of groups of [1] parameters, ours have [28]": (
        load_a_state_of_other_parameters
    ),
    "ValueError: missing or unknown: norm.bias, other": load_unknown_names,
    "RuntimeError: a second backward through the same forward of": (
        one_forward_and_two_backwards
    ),
    "RuntimeError: a gradient became ready twice: call finish_gradient_synchronization": (
        two_backwards_without_a_finish
    ),
    "RuntimeError: a parameter of shape [5] has got another tensor": put_other_memory,
    "RuntimeError: weight of LayerNorm was set after": set_a_parameter_anew,
    "RuntimeError: a parameter of SmallTransformer was changed": change_a_gathered_parameter,
}


def test_a_misuse_is_named_on_every_rank(ranks):
    for said in ranks(2, refusals, list(BY_ONE.values())).results:
        for expected, found in zip(BY_ONE, said, strict=True):
            assert found.startswith(expected)
