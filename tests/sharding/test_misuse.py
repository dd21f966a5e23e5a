"""A misuse of a wrapper is named on every rank; nobody waits for anybody."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.sharding.gradients import ShardedGradients
from mgpu_tutorial.sharding.model import ShardedModel
from mgpu_tutorial.sharding.optimizer import ShardedOptimizer
from mgpu_tutorial.shared.models import SmallTransformer
from tests.sharding.reference import VOCABULARY, loss_of, new_model


def other_modules(rank, wrapper):
    wrapper(SmallTransformer(VOCABULARY, width=5, heads=1, depth=2 + (rank == 1)))


def a_wrapper_inside(rank, wrapper):
    ShardedModel(nn.Sequential(nn.Linear(2, 2), wrapper(nn.Linear(2, 2))))


def wrapped_twice(rank, wrapper):
    ShardedGradients(wrapper(new_model()))


def inside_ddp(rank, wrapper):
    DistributedDataParallel(wrapper(new_model()))


def nothing_to_train(rank, wrapper):
    wrapper(nn.Linear(2, 2).requires_grad_(False))


def around_ddp(rank, wrapper):
    wrapper(nn.Sequential(DistributedDataParallel(nn.Linear(2, 2))))


def a_strange_unit(rank):
    ShardedModel(new_model(), units=[nn.Linear(2, 2)])


def other_units(rank):
    module = new_model()
    ShardedModel(module, units=[module] if rank == 1 else None)


def another_dtype(rank):
    ShardedModel(new_model(), compute_dtype=torch.bfloat16 if rank == 1 else None)


def no_class(rank):
    ShardedOptimizer([nn.Parameter(torch.ones(1))], "Adam")


def a_state_of_other_parameters(rank):
    optimizer = ShardedOptimizer(new_model().parameters(), torch.optim.SGD, lr=0.1)
    other = ShardedOptimizer([nn.Parameter(torch.ones(1))], torch.optim.SGD, lr=0.1)
    optimizer.load_state_dict(other.state_dict())


def unknown_names(rank):
    model = ShardedModel(new_model(), units=None)
    whole = model.full_parameters()
    whole["other"] = whole.pop("norm.bias")
    model.load_full_parameters(whole)


def one_forward_and_two_backwards(rank):
    model = ShardedModel(new_model())
    with torch.no_grad():
        loss_of(model, 0)  # owes no backward
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    loss.backward()


def two_backwards_without_a_finish(rank):
    model = ShardedGradients(new_model())
    for step in (0, 1):
        loss_of(model, step).backward()


def a_parameter_with_other_memory(rank):
    model = ShardedGradients(new_model())
    model.module.norm.weight.data = torch.ones(5, dtype=torch.float64)
    loss_of(model, 0).backward()
    model.finish_gradient_synchronization()
    model.gather_parameters()


def a_parameter_set_anew(rank):
    model = ShardedModel(new_model())
    model.module.norm.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))
    loss_of(model, 0)


def zero_the_weight(layer, _):
    with torch.no_grad():
        layer.weight.zero_()


def a_parameter_changed_in_forward(rank):
    model = ShardedModel(new_model())
    model.module.norm.register_forward_pre_hook(zero_the_weight)
    with torch.no_grad():
        loss_of(model, 0)


def a_parameter_changed_in_training(rank):
    model = ShardedModel(new_model())
    model.module.norm.register_forward_pre_hook(zero_the_weight)
    loss_of(model, 0)


OF_BOTH = {
    other_modules: "ValueError: rank 1 has ",
    a_wrapper_inside: "ValueError: there is a {} inside at '1': wrap a module once",
    wrapped_twice: "ValueError: there is a {} inside: wrap a module once",
    around_ddp: "ValueError: there is a DistributedDataParallel inside at '0': wrap",
    inside_ddp: "ValueError: a sharded module averages its gradients by itself",
    nothing_to_train: "ValueError: no parameter requires a gradient",
}
OF_ONE = {
    a_strange_unit: "ValueError: units must be submodules of the module, got [Linear(",
    other_units: "ValueError: rank 1 has other units or another compute_dtype than rank 0",
    another_dtype: "ValueError: rank 1 has other units or another compute_dtype than rank 0",
    no_class: "TypeError: optimizer_class must be a class of torch.optim, got 'Adam'",
    a_state_of_other_parameters: "ValueError: the state is of groups of [1] parameters, ours",
    unknown_names: "ValueError: missing or unknown: norm.bias, other",
    one_forward_and_two_backwards: "RuntimeError: a second backward through the same forward",
    two_backwards_without_a_finish: "RuntimeError: a gradient became ready twice",
    a_parameter_with_other_memory: "RuntimeError: a parameter of shape [5] has got another",
    a_parameter_set_anew: "RuntimeError: weight of LayerNorm was set after",
    a_parameter_changed_in_forward: "RuntimeError: a parameter of SmallTransformer was",
    a_parameter_changed_in_training: "RuntimeError: ",  # PyTorch itself forbids it
}


def refusals(rank, world_size, misuses, *wrapper):
    """What each misuse raises on this rank, one after the other."""
    said = {}
    for misuse in misuses:
        try:
            misuse(rank, *wrapper)
        except (ValueError, TypeError, RuntimeError) as error:
            said[misuse] = f"{type(error).__name__}: {error}"
    return said


@pytest.mark.parametrize("misuse", OF_BOTH)
@pytest.mark.parametrize("wrapper", [ShardedGradients, ShardedModel])
def test_a_wrapper_refuses_on_every_rank(ranks, wrapper, misuse):
    for said in ranks(2, refusals, list(OF_BOTH), wrapper).results:
        assert said[misuse].startswith(OF_BOTH[misuse].format(wrapper.__name__))


@pytest.mark.parametrize("misuse", OF_ONE)
def test_a_misuse_is_named_on_every_rank(ranks, misuse):
    for said in ranks(2, refusals, list(OF_ONE)).results:
        assert said[misuse].startswith(OF_ONE[misuse])
