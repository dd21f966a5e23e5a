"""Shards of all ranks together: clipped, decayed and saved as one process does it."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.sharding.blocks import fully_sharded
from mgpu_tutorial.sharding.whole import clip_grad_norm
from mgpu_tutorial.sharding.zero import sharded_step
from mgpu_tutorial.shared.models import SmallTransformer


def layers():
    torch.manual_seed(0)
    first = nn.Linear(4, 4).requires_grad_(False)
    return nn.Sequential(first, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch(rank, world_size):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).double()
    return x.chunk(world_size)[rank]


def step_and_clip(rank, world_size):
    """Three steps of stage 1: a layer is frozen, two ranks own all, and a hook clips."""
    model, owner = layers(), [0, 0, 0, 1, 1, 0]
    parameters = [p for p in model.parameters() if p.requires_grad]
    mine = [p for p, who in zip(parameters, owner[2:], strict=True) if who == rank]
    adam = AdamW([{"params": mine if world_size > 1 else parameters}], lr=0.1)

    def clip(*_):
        if world_size > 1:
            clip_grad_norm(mine, 0.1, [None])
        else:
            nn.utils.clip_grad_norm_(parameters, 0.1)

    adam.register_step_pre_hook(clip)
    for _ in range(3):
        model.zero_grad()
        model(batch(rank, world_size)).square().mean().backward()
        if world_size > 1:
            sharded_step(model.parameters(), owner, adam)
        else:
            adam.step()
    return list(model.parameters())


def test_stage_1_clips_in_a_hook_where_a_rank_owns_nothing(ranks):
    found = ranks(3, step_and_clip).results
    assert largest_difference(found, [step_and_clip(0, 1)] * 3) < 1e-12


def step_without_a_gradient(rank, world_size):
    model = layers().requires_grad_()
    model[1](torch.ones(1, 4).double()).sum().backward()
    sharded_step(model.parameters(), [0] * 6, AdamW(model.parameters()))


def test_a_parameter_without_a_gradient_is_named(refused):
    refused(2, RuntimeError("parameter 0", "(4, 4)"), step_without_a_gradient)


def state_alone(rank, world_size):
    model = layers().requires_grad_()
    fully_sharded(model, [model[1]])
    model.state_dict()


def test_shards_are_not_given_as_the_model_s_state(refused):
    refused(2, RuntimeError("whole_state"), state_alone)


class Twice(nn.Module):
    """One block at two places, and a buffer in it."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.two, self.head = self.one, nn.Linear(3, 3)


def save_and_load(rank, world_size):
    torch.manual_seed(0)
    root = fully_sharded(model := Twice(), [model.one])
    state = [root.whole_state()]
    torch.distributed.broadcast_object_list(state)
    torch.manual_seed(1)
    other = fully_sharded(model := Twice(), [model.one])
    other.load_whole_state(state[0])
    return state[0], other.shard.equal(root.shard), other.one.shard.equal(root.one.shard)


def transformer():
    torch.manual_seed(0)
    return SmallTransformer(5, width=4, heads=1, depth=2).double()


def decay(rank, world_size):
    """A tied transformer after two steps of AdamW that decay no bias and no norm."""
    model = root = transformer()
    if world_size == 1:
        every = list(model.parameters())
        groups = [
            {"params": [p for p in every if p.dim() > 1], "weight_decay": 0.5},
            {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = AdamW(groups, lr=0.1)
    else:
        root = fully_sharded(model, list(model.blocks))
        optimizer = AdamW(root.parameters(), lr=0.1, weight_decay=0)
        root.decay_matrices(optimizer, 0.5)
    tokens = torch.arange(24).view(6, 4).chunk(world_size)[rank] % 5
    for _ in range(2):
        optimizer.zero_grad()
        cross_entropy(root(tokens).flatten(0, 1), (tokens + 1).flatten() % 5).backward()
        optimizer.step()
    return root.whole_state() if world_size > 1 else root.state_dict()


@pytest.mark.parametrize("world_size", [2, 3])
def test_matrices_decay_as_in_one_process(ranks, world_size):
    expected = decay(0, 1)
    first, *others = ranks(world_size, decay).results
    assert first.keys() == expected.keys() and others == [{}] * (world_size - 1)
    far = {name: largest_difference(first[name], expected[name]) for name in expected}
    assert max(far.values()) < 1e-12, far


def load_another(rank, world_size):
    root = fully_sharded(model := transformer(), list(model.blocks))
    root.load_whole_state({name: t.T for name, t in transformer().state_dict().items()})


def test_a_state_of_other_shapes_is_refused(refused):
    refused(2, ValueError("token.weight"), load_another)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_block_at_two_places_is_saved_and_loaded_at_both(ranks, world_size):
    torch.manual_seed(0)
    expected = Twice().state_dict()
    for state, *same in ranks(world_size, save_and_load).results:
        assert same == [True, True] and state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
