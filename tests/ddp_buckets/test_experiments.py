"""What the five wrappers train, and why the ranks agree."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mgpu_tutorial.ddp_buckets import experiments
from mgpu_tutorial.ddp_buckets.wrappers import WRAPPERS
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
def test_five_wrappers_train_what_a_plain_loop_trains(ranks, world_size):
    settings = {wrapper.__name__: {"wrapper": wrapper, "steps": 3} for wrapper in WRAPPERS}
    call = experiments.run_each_setting, experiments.train_replicas, settings
    for result in ranks(world_size, *call).results:
        assert list(result) == list(settings)
        for trained in result.values():
            torch.testing.assert_close(trained, one_process(3))


def test_alone_is_a_plain_loop():
    torch.testing.assert_close(experiments.train_alone(3), one_process(3))


DIFFERENT = {  # fingerprints at the start and after each of four steps, on three ranks
    "nothing": [1, 1, 1, 1, 1],
    "start": [2, 2, 2, 2, 2],  # rank 1 against all others, for ever
    "gradient": [1, 3, 3, 3, 3],
    "step": [1, 3, 3, 3, 3],
}


@pytest.mark.parametrize("broken", DIFFERENT)
def test_replicas_agree_until_one_of_three_things_is_broken(ranks, broken):
    prints = ranks(3, experiments.take_fingerprints, WRAPPERS[3], broken).results
    assert [len(set(column)) for column in zip(*prints, strict=True)] == DIFFERENT[broken]
    assert all(len(set(row)) == 5 for row in prints)  # each step changes the model
    if broken == "start":
        assert prints[0] == prints[2]


@given(world_size=st.integers(1, 6), steps=st.integers(1, 3), width=st.integers(1, 5))
def test_shares_of_all_ranks_are_the_whole_batches(world_size, steps, width):
    whole = torch.randn(steps, 24, width, generator=torch.Generator().manual_seed(1))
    of_ranks = [experiments.shares(r, world_size, steps, width) for r in range(world_size)]
    for step in range(steps):
        assert torch.equal(torch.cat([share[step] for share in of_ranks]), whole[step])
    lengths = [len(share[0]) for share in of_ranks]
    assert max(lengths) - min(lengths) <= 1


def test_a_setting_is_what_it_says(monkeypatch):
    setting = experiments.Setting(width=16, depth=3, batch=5, pause=0.25)
    tower = setting.tower()
    assert [layer.weight.shape for layer in tower.body] == [(16, 16)] * 3
    assert tower.pause == 0.25 and setting.inputs().shape == (5, 16)
    seconds = []
    monkeypatch.setattr(experiments, "slow_link", seconds.append)
    experiments.Setting(link=Link(latency=0.5, bandwidth=100.0)).network(4)
    # 2 (N - 1) messages, each of a quarter of the bytes
    assert seconds[0](800) == 6 * (0.5 + 200 / 100.0)
    experiments.Setting(link=None).network(4)
    assert len(seconds) == 1


@pytest.mark.slow
def test_the_backward_of_each_layer_pauses_and_the_forward_does_not():
    import time

    model = experiments.Tower(8, depth=3, pause=0.05)
    begin = time.perf_counter()
    loss = model(torch.ones(1, 8)).sum()
    middle = time.perf_counter()
    loss.backward()
    assert time.perf_counter() - middle >= 0.15 > middle - begin
