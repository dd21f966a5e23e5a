"""One process that plays a rank of many: what it calls is right, what it computes is not."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from mgpu_tutorial.at_scale.pretend import pretend


def shard_three(rank, world_size):
    """Three layers of 64 x 64 without bias, a unit each, and nothing for the root."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    local = model[0].weight.to_local().shape
    model(torch.ones(8, 64, requires_grad=True)).sum().backward()
    return {"whole": model[0].weight.shape, "here": [tuple(local)], "rank": rank}


def test_calls_bytes_and_operations_are_those_of_fully_shard():
    seen = pretend(shard_three, world_size=16)
    assert seen.world_size == 16
    # each layer in forward and in backward, 64 x 64 float32 each time
    assert seen.calls == {"all_gather": 6, "reduce_scatter": 3}
    assert seen.nbytes == {"all_gather": 6 * 64 * 64 * 4, "reduce_scatter": 3 * 64 * 64 * 4}
    # a product forward and two backward, of 2 · 8 · 64 · 64 operations each
    assert seen.flops == 3 * 3 * 2 * 8 * 64 * 64
    assert seen.returned == {"whole": (64, 64), "here": [(4, 64)], "rank": 0}


def call_each(rank, world_size):
    """Calls of plain torch.distributed, of 12 bytes."""
    three = torch.ones(3)
    dist.all_reduce(three)
    dist.all_reduce(three)
    dist.broadcast(three, src=0)
    dist.reduce(three, dst=0)
    dist.all_gather([torch.empty(3) for _ in range(world_size)], three)
    many = [torch.empty(3) for _ in range(world_size)]
    dist.reduce_scatter(three, many)
    dist.all_to_all(many, [torch.empty(3) for _ in range(world_size)])
    dist.all_gather_single(torch.empty(3 * world_size), three)
    dist.send(three, dst=1)
    dist.recv(three, src=1)
    return dist.get_world_size(), rank


def test_plain_collectives_are_counted_by_their_larger_side():
    seen = pretend(call_each, world_size=5)
    assert seen.returned == (5, 0)
    once = {"broadcast": 12, "reduce": 12, "reduce_scatter": 60, "all_to_all": 60}
    once |= {"send": 12, "recv": 12}
    twice = {"all_reduce": 24, "all_gather": 120}
    assert seen.calls == dict.fromkeys(once, 1) | dict.fromkeys(twice, 2)
    assert seen.nbytes == once | twice
