"""PyTorch's own DDP as priced, beside the real one on the same model."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mgpu_tutorial.instruments.price import price
from mgpu_tutorial.instruments.price.tape import Call
from mgpu_tutorial.lab import span
from tests.instruments.price.test_tape import preloaded  # noqa: F401

WIDTH, DEPTH = 1024, 20


def network(width=WIDTH):
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(DEPTH)]
    return nn.Sequential(*layers, nn.BatchNorm1d(width))


def train(rank, world_size, steps=2, accumulate=False, **options):
    model = DistributedDataParallel(network(), **options)
    optimizer = torch.optim.SGD(model.parameters())
    x = torch.randn(8, WIDTH)
    for _ in range(steps):
        with span("step"):
            if accumulate:
                with model.no_sync():
                    model(x).sum().backward()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def real_buckets(rank, world_size, **options):
    """The bytes of each bucket after some steps, as PyTorch's own log has them."""
    ddp = DistributedDataParallel(network(), **options)
    for _ in range(4):
        ddp(torch.randn(8, WIDTH)).sum().backward()
    sizes = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return [int(size) for size in sizes.split(",")]


def sent(found, name):
    events = found.tapes[0].events
    return [e.nbytes for e in events if isinstance(e, Call) and e.name == name]


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 10}, {"static_graph": True}])
def test_buckets_are_those_of_the_real_one(ranks, options):
    found = price(train, 4, steps=3, **options)
    assert sent(found, "all_reduce") == ranks(2, real_buckets, **options).results[0]


def test_in_the_first_step_all_gradients_are_one_bucket():
    found = price(train, 4, steps=1)
    every = 4 * sum(p.numel() for p in network().parameters())
    assert sent(found, "all_reduce") == [every]
    assert sent(price(train, 4, static_graph=True), "all_reduce") == [every]
    assert found.exposed > price(train, 4).exposed


def test_buckets_leave_under_backward():
    """The last one alone is left when backward ends, as far as the link is fast enough."""
    found = price(train, 4)
    begins = [
        found.played[0].begins[i]
        for i, event in enumerate(found.tapes[0].events)
        if isinstance(event, Call) and event.name == "all_reduce"
    ]
    assert len(begins) > 2 and begins == sorted(begins)
    assert begins[0] < begins[-1] - 1e-4


def test_it_broadcasts_where_it_wraps_and_buffers_before_each_forward():
    def all_of(**options):
        return sent(price(wrap_and_compute, 4, **options), "broadcast")

    state = 4 * sum(p.numel() for p in network(64).parameters()) + 2 * 4 * 64
    assert all_of() == [state, 8, 2 * 4 * 64, 8]  # and the batches that a BatchNorm counts
    assert all_of(forward_sync_buffers=False) == [state, 8]
    assert all_of(init_sync=False) == [2 * 4 * 64, 8]


def wrap_and_compute(rank, world_size, **options):
    DistributedDataParallel(network(64), **options)(torch.randn(8, 64))


def test_no_sync_sends_nothing():
    assert sent(price(train, 4, accumulate=True), "all_reduce") == sent(
        price(train, 4), "all_reduce"
    )


def held(**options):
    full = price(train, 4, steps=3, **options).fullest()
    return full["buffers"] + full["gradients"]


def test_a_view_of_the_bucket_is_the_gradient():
    """The buckets are a second copy of the gradients, and as views the only one."""
    every = 4 * sum(p.numel() for p in network().parameters())
    assert held() == pytest.approx(2 * every, rel=0.1)
    assert held(gradient_as_bucket_view=True) == pytest.approx(every, rel=0.1)


class Half(nn.Module):
    """Two layers, of which one has no part in the loss."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.used(x)


def train_half(rank, world_size, find):
    model = DistributedDataParallel(Half(), find_unused_parameters=find)
    for _ in range(2):
        model(torch.randn(8, 64)).sum().backward()


def test_unused_parameters_are_sent_if_one_asks_and_refused_else():
    every = 4 * sum(p.numel() for p in Half().parameters())
    calls = sent(price(train_half, 4, True), "all_reduce")
    assert calls == [every, 4 * 4] * 2  # and which ones were used
    with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
        price(train_half, 4, False)


def train_in_a_group(rank, world_size):
    half = dist.new_group([0, 1])
    layer = nn.Linear(64, 64)
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    model = DistributedDataParallel(layer, process_group=half)
    for _ in range(2):
        model(torch.randn(8, 64)).sum().backward()


def test_a_group_of_its_own_under_a_checkpoint():
    events = price(train_in_a_group, 4).tapes[0].events
    groups = {event.group for event in events if isinstance(event, Call)}
    assert groups == {(0, 1)}
