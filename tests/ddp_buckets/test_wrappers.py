"""What the wrappers train, when they communicate, and what a bucket holds."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets import experiments
from mgpu_tutorial.ddp_buckets.experiments import WRAPPERS
from mgpu_tutorial.ddp_buckets.figures import count_calls, record_steps
from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP, NaiveDDP, into_buckets
from mgpu_tutorial.lab.record.intervals import events_of, payload
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
    return [list(gradients), [p.detach() for p in parameters]]


def test_a_cap_is_in_mebibytes():
    """The last parameter has more than a million bytes, and less than one MiB."""
    parameters = [nn.Parameter(torch.empty(n)) for n in (5, 20_000, 250_001)]
    buckets = into_buckets(parameters, 1)
    assert [[p.numel() for p in bucket] for bucket in buckets] == [[250_001, 20_000], [5]]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_each_wrapper_trains_what_a_plain_loop_trains(ranks, wrapper):
    starts = [experiments.train_replicas(rank, 2, steps=0)[1][0] for rank in (0, 1)]
    assert not torch.equal(*starts)  # the wrapper has to make them alike
    call = experiments.train_replicas, wrapper, 3
    alone = experiments.train_replicas(0, 1, steps=3)
    for trained in [alone, *ranks(3, *call, **WRAPPERS[wrapper]).results]:
        torch.testing.assert_close(trained, one_process(3))


PARAMETERS, WEIGHTS = 14, 6
NBYTES = 4 * (6 * (256 * 256 + 256) + 256 * 10 + 10)
CALLS = {  # how many, and how many of them begin during backward
    NaiveDDP: (PARAMETERS, 0),
    BucketedDDP: (WEIGHTS + 1, WEIGHTS + 1),  # the head, which is defined first, alone
    DistributedDataParallel: (WEIGHTS, WEIGHTS),
}


@pytest.mark.parametrize("wrapper", CALLS)
def test_each_wrapper_makes_its_calls_at_its_time_over_the_link(ranks, wrapper):
    options = {} if wrapper is NaiveDDP else {"bucket_cap_mb": 1 / 4}  # a weight
    report = ranks(2, record_steps, wrapper, Link(10e-3, 1e9), trace=True, **options)
    assert count_calls(report, "step 2") == CALLS[wrapper]
    assert payload(report, "step 2") == NBYTES
    sent = [e for e in events_of(report, "step 2") if e.op == "all_reduce"]
    assert all((e.done or e.end) - e.begin > 20e-3 for e in sent)


def left_alone(rank, world_size, wrapper):
    """The second layer is this rank's own: its parameters and gradients stay as they are."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in model[1].parameters():
        parameter.own = True
    before = model[1].weight.detach().clone()
    ddp = wrapper(model)
    ddp(torch.ones(1, 2) * (rank + 1)).sum().backward()
    ddp.finish_gradient_synchronization()
    assert torch.equal(model[1].weight, before)
    return [p.grad for p in model.parameters()], model[0].weight.detach()


@pytest.mark.parametrize("wrapper", [NaiveDDP, BucketedDDP])
def test_what_is_a_ranks_own_is_left_alone(ranks, wrapper):
    (one, other), (weight, same) = zip(*ranks(2, left_alone, wrapper).results, strict=True)
    assert torch.equal(weight, same)
    assert [torch.equal(a, b) for a, b in zip(one, other, strict=True)][:2] == [True, True]
    assert not torch.equal(one[2], other[2])
    assert torch.equal(one[3], torch.ones(2))  # of a bias, one sample's and not the mean
