"""What the wrappers train."""

import pytest
import torch
from torch import nn

from mgpu_tutorial.ddp_buckets import experiments
from mgpu_tutorial.ddp_buckets.experiments import WRAPPERS


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
    torch.testing.assert_close(experiments.train_alone(3), one_process(3))
