"""What the five wrappers train, and why the ranks agree."""

import pytest
import torch
from torch import nn

from mgpu_tutorial.ddp_buckets import experiments
from mgpu_tutorial.ddp_buckets.wrappers import WRAPPERS
from mgpu_tutorial.lab import launch
from tests.thorough import again


def one_process(steps):
    """The same network, batches and optimizer by hand: the last gradients, and parameters."""
    torch.manual_seed(0)
    head = nn.Linear(64, 10)
    body = [nn.Linear(64, 64) for _ in range(4)]
    parameters = [p for layer in (head, *body) for p in layer.parameters()]
    batches = torch.randn(steps, 24, 64, generator=torch.Generator().manual_seed(1))
    velocity = [torch.zeros_like(p) for p in parameters]
    for x in batches:
        for layer in body:
            x = layer(x).clamp(min=0)
        gradients = torch.autograd.grad((head(x) ** 2).mean(), parameters)
        with torch.no_grad():
            for p, v, gradient in zip(parameters, velocity, gradients, strict=True):
                v.copy_(0.9 * v + gradient)
                p -= 0.1 * v
    return list(gradients), [p.detach() for p in parameters]


@pytest.mark.parametrize("world_size", [2, again(3)])
def test_five_wrappers_train_what_a_plain_loop_trains(world_size):
    ways = {wrapper.__name__: {"wrapper": wrapper, "steps": 3} for wrapper in WRAPPERS}
    expected = one_process(3)
    worker = experiments.train_replicas
    for found in launch(experiments.run_each_setting, world_size, worker, ways).results:
        assert list(found) == list(ways)
        for trained in found.values():
            torch.testing.assert_close(trained, expected)


def test_alone_is_a_plain_loop():
    torch.testing.assert_close(experiments.train_alone(3), one_process(3))


@pytest.mark.parametrize("world_size", [2, again(3)])
def test_replicas_agree_until_one_of_three_things_is_broken(world_size):
    settings = {
        (wrapper, broken): {"wrapper": wrapper, "broken": broken}
        for wrapper in WRAPPERS
        for broken in ("nothing", "start", "gradient", "step")
    }
    worker = experiments.take_fingerprints
    runs = launch(experiments.run_each_setting, world_size, worker, settings).results
    different = {
        "nothing": [1] * 5,
        "start": [2] * 5,  # rank 1 against all others, for ever
        "gradient": [1] + [world_size] * 4,
        "step": [1] + [world_size] * 4,
    }
    for wrapper, broken in settings:
        moments = zip(*(run[wrapper, broken] for run in runs), strict=True)
        counts = [len(set(prints)) for prints in moments]
        assert counts == different[broken], (wrapper, broken)
        assert len(set(runs[0][wrapper, broken])) == 5  # each step changes the model


def test_one_step_is_followed_from_two_starts_to_one_weight():
    first, second = launch(experiments.follow_one_step, 2).results
    assert list(first.values()) == [1.0, 1.0, 2.0, 3.0, 0.7]
    assert list(second.values()) == [9.0, 1.0, 4.0, 3.0, 0.7]


def test_letters_follow_the_order_of_appearance():
    assert experiments.name_by_letters([["x", "z"], ["y", "z"]]) == [["A", "C"], ["B", "C"]]


def test_shares_of_all_ranks_are_the_whole_batch():
    (whole,) = experiments.shares(0, 1, 1, 8)
    parts = [experiments.shares(rank, 3, 1, 8)[0] for rank in range(3)]
    assert [len(part) for part in parts] == [8, 8, 8]
    assert whole.tolist() == sum((part.tolist() for part in parts), [])
