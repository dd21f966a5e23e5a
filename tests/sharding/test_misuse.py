"""A misuse of a wrapper is named on every rank; nobody waits for anybody."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.sharding.gradients import ShardedGradients
from mgpu_tutorial.sharding.model import ShardedModel
from mgpu_tutorial.sharding.optimizer import ShardedOptimizer
from mgpu_tutorial.sharding.training import loss_of
from mgpu_tutorial.shared.models import SmallTransformer
from tests.sharding.reference import new_model


def load_a_state_of_other_parameters(rank, world_size):
    optimizer = ShardedOptimizer(new_model().parameters(), torch.optim.SGD, lr=0.1)
    other = ShardedOptimizer([nn.Parameter(torch.ones(1))], torch.optim.SGD, lr=0.1)
    optimizer.load_state_dict(other.state_dict())


def go_backward_twice(rank, world_size):
    model = ShardedModel(new_model())
    with torch.no_grad():
        loss_of(model, 0, rank, world_size)  # owes no backward
    loss = loss_of(model, 0, rank, world_size)
    loss.backward(retain_graph=True)
    loss.backward()


def forget_to_finish(rank, world_size):
    model = ShardedGradients(new_model())
    for step in (0, 1):
        loss_of(model, step, rank, world_size).backward()


def put_other_memory(rank, world_size):
    model = ShardedGradients(new_model())
    model.module.norm.weight.data = torch.ones(5, dtype=torch.float64)
    model.gather_parameters()


def set_a_parameter_anew(rank, world_size):
    model = ShardedModel(new_model())
    model.module.norm.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))
    loss_of(model, 0, rank, world_size)


def change_a_gathered_parameter(rank, world_size):
    model = ShardedModel(new_model())
    model.module.norm.register_forward_pre_hook(lambda norm, _: norm.weight.zero_())
    with torch.no_grad():
        loss_of(model, 0, rank, world_size)


MISUSES = {  # by what is said of them
    "rank 1 has ": lambda rank, _: ShardedGradients(SmallTransformer(depth=2 + rank)),
    "rank 1 has other units": lambda rank, _: ShardedModel(new_model(), [] if rank else None),
    "there is a ShardedGradients inside at '1'": lambda rank, _: ShardedModel(
        nn.Sequential(nn.Linear(2, 2), ShardedGradients(nn.Linear(2, 2)))
    ),
    "DistributedDataParallel inside at '0'": lambda rank, _: ShardedGradients(
        nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)))
    ),
    "a sharded module averages its gradients by itself": lambda rank, _: (
        DistributedDataParallel(ShardedModel(nn.Linear(2, 2)))
    ),
    "no parameter requires a gradient": lambda rank, _: ShardedModel(
        nn.Linear(2, 2).requires_grad_(False)
    ),
    "the state is of groups of": load_a_state_of_other_parameters,
    "a second backward through the same forward": go_backward_twice,
    "a gradient became ready twice": forget_to_finish,
    "a parameter of shape .5. has got another tensor": put_other_memory,
    "weight of LayerNorm was set after": set_a_parameter_anew,
    "a parameter of SmallTransformer was changed": change_a_gathered_parameter,
}


@pytest.mark.parametrize("says", MISUSES)
def test_a_misuse_is_named_on_every_rank(ranks, says):
    with pytest.raises(RankFailed, match=f"ranks 0 and 1 (.|\n)*Error: .*{says}"):
        ranks(2, MISUSES[says])
