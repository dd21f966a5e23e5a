"""What the wrappers train, and why the ranks agree."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets import experiments
from mgpu_tutorial.ddp_buckets.experiments import WRAPPERS
from mgpu_tutorial.ddp_buckets.wrappers import NaiveDDP
from mgpu_tutorial.shared.cost_model.links import Link


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


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_wrapper_trains_what_a_plain_loop_trains(ranks, world_size):
    settings = {wrapper.__name__: {"wrapper": wrapper, "steps": 3} for wrapper in WRAPPERS}
    call = experiments.run_each_setting, experiments.train_replicas, settings
    for result in ranks(world_size, *call).results:
        assert list(result) == list(settings)
        for trained in result.values():
            torch.testing.assert_close(trained, one_process(3))


def test_alone_is_a_plain_loop():
    torch.testing.assert_close(experiments.train_alone(3), one_process(3))


def nothing(model, optimizer):
    pass


def start(model, optimizer):
    if dist.get_rank() == 1:
        model.module.head.reset_parameters()


def gradient(model, optimizer):
    model.finish_gradient_synchronization = lambda: None
    model.require_backward_grad_sync = False


def step(model, optimizer):
    optimizer.param_groups[0]["lr"] /= 1 + dist.get_rank()


DIFFERENT = {  # fingerprints at the start and after each of four steps, on three ranks
    nothing: [1, 1, 1, 1, 1],
    start: [2, 2, 2, 2, 2],  # rank 1 against all others, for ever
    gradient: [1, 3, 3, 3, 3],
    step: [1, 3, 3, 3, 3],
}


@pytest.mark.parametrize("wrapper", [NaiveDDP, DistributedDataParallel])
@pytest.mark.parametrize("broken", DIFFERENT)
def test_replicas_agree_until_one_of_three_things_is_broken(ranks, broken, wrapper):
    prints = ranks(3, experiments.take_fingerprints, wrapper, broken).results
    assert [len(set(column)) for column in zip(*prints, strict=True)] == DIFFERENT[broken]
    assert all(len(set(row)) == 5 for row in prints)  # each step changes the model
    if broken is start:
        assert prints[0] == prints[2]


@given(world_size=st.integers(1, 6), steps=st.integers(1, 3), width=st.integers(1, 5))
def test_shares_of_all_ranks_are_the_whole_batches(world_size, steps, width):
    whole = torch.randn(steps, 24, width, generator=torch.Generator().manual_seed(1))
    of_ranks = [experiments.shares(r, world_size, steps, width) for r in range(world_size)]
    for number in range(steps):
        assert torch.equal(torch.cat([share[number] for share in of_ranks]), whole[number])
    lengths = [len(share[0]) for share in of_ranks]
    assert max(lengths) - min(lengths) <= 1


def test_a_link_takes_the_time_of_a_ring(monkeypatch):
    seconds = []
    monkeypatch.setattr(experiments, "slow_link", seconds.append)
    experiments.Setting(link=Link(latency=0.5, bandwidth=100.0)).network(4)
    # 2 (N - 1) messages, each of a quarter of the bytes
    assert seconds[0](800) == 6 * (0.5 + 200 / 100.0)
    experiments.Setting(link=None).network(4)
    assert len(seconds) == 1
