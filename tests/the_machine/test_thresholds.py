"""What the chapters say of when each way pays, beside a replay on both sides of it.

Links have no latency here, and the memory no limit: the lines count bytes and products.
"""

import math

import pytest
import torch
from torch import nn

from mgpu_tutorial.instruments.price.machine import machine_of
from mgpu_tutorial.instruments.price.pricing import tape_all
from mgpu_tutorial.instruments.price.replay import replay
from mgpu_tutorial.instruments.price.tape import Call, Operation, Wait
from mgpu_tutorial.lab import span
from mgpu_tutorial.pipelines.stages import order_of_1f1b
from mgpu_tutorial.sharding.blocks import PrefetchingBlock, linked
from mgpu_tutorial.shared.cost_model.links import Link
from mgpu_tutorial.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

H100S = machine_of("8 x H100")
LINK = Link(0.0, H100S.inside.bandwidth)
NODE = H100S._replace(inside=LINK, kernel=0.0, memory_rate=math.inf)
F, B = NODE.flops, LINK.bandwidth


def share_of(events, machine=NODE):
    """The exposed messages of rank 0 over its computing."""
    (player,) = replay({0: events}, machine).values()
    return player.exposed / player.computing


def sharded(rank, world_size, tokens):
    """The blocks of `sharding` that gather ahead, each one product."""
    torch.set_default_dtype(torch.bfloat16)
    model = linked([PrefetchingBlock(nn.Linear(512, 512, bias=False)) for _ in range(12)])
    with span("step"):
        model(torch.ones(tokens, 512, requires_grad=True)).sum().backward()


def tensor_parallel(rank, world_size, width):
    """The products of a layer by columns and rows: of attention and perceptron."""
    torch.set_default_dtype(torch.bfloat16)
    sizes = [(width, 3 * width, width), (width, 4 * width, 4 * width)]
    pairs = [
        (
            ColumnParallelLinear(nn.Linear(inputs, columns, bias=False)),
            RowParallelLinear(nn.Linear(rows, inputs, bias=False)),
        )
        for inputs, columns, rows in sizes
    ]
    x = torch.ones(64, width, requires_grad=True)
    with span("step"):
        for column, row in pairs:
            x = row(column(x)[:, : row.weight.shape[1]])
        x.sum().backward()


def taped(worker, jobs):
    """What rank 0 does on so many ranks, with these arguments."""
    tapes = tape_all(worker, [(ranks, given, {}) for ranks, *given in jobs], timeout=300)
    return [found[0].events for found in tapes]


@pytest.mark.slow
def test_sharding_hides_from_as_many_tokens_as_data_parallelism():
    """Per parameter 2 operations beside a gather; 4 beside a gather and a reduce-scatter."""
    line = 7 / 8 * F / B
    few, many = round(0.75 * line), round(1.1 * line)
    below, above = taped(sharded, [(8, few), (8, many)])
    gather = 7 / 8 * 2 * 512**2 / B
    computing = 12 * 6 * 512**2 / F
    at = {n: share_of(events) * n * computing for n, events in ((few, below), (many, above))}
    assert at[few] > 0.9 * (36 * gather - few * computing) > 8 * gather
    assert at[many] < 4 * gather  # the first gather, and what backward ends with


@pytest.mark.slow
@pytest.mark.parametrize("width", [1024, 4096])
def test_messages_of_tensor_parallelism_take_the_share_that_is_allowed(width):
    """t = 1 + 4.5 s h B / F: four all-reduces beside 72 h² operations per token."""
    ranks = 2, 4, 8
    tapes = taped(tensor_parallel, [(t, width) for t in ranks])
    for t, events in zip(ranks, tapes, strict=True):
        assert t == pytest.approx(1 + 4.5 * share_of(events) * width * B / F, rel=1e-3)


@pytest.mark.parametrize("micro", [1, 3, 4, 6, 30])
def test_a_pipeline_waits_for_the_share_that_its_micro_batches_allow(micro):
    """m = (p - 1) / s: GPipe's schedule, backward twice as long, messages for nothing."""
    stages, tapes = 4, {}
    for rank in range(stages):
        events = tapes[rank] = []
        for name in order_of_1f1b(rank, stages, micro):
            is_forward, tag = name[0] == "F", 2 * int(name[1:]) + (name[0] == "B")
            source, target = (rank - 1, rank + 1) if is_forward else (rank + 1, rank - 1)
            if 0 <= source < stages:
                events += [Call("irecv", 0, (), source, tag), Wait(len(events))]
            events.append(Operation(name, seconds=1.0 if is_forward else 2.0))
            if 0 <= target < stages:
                events.append(Call("isend", 0, (), target, tag))
    players = replay(tapes, NODE)
    assert players[0].exposed / players[0].computing == pytest.approx((stages - 1) / micro)


@pytest.mark.parametrize("group", [1, 4])
def test_a_ring_of_blocks_hides_from_a_block_of_so_many_tokens(group):
    """c = 2F / (g B): 8 ranks send a block on while they attend to the half not masked."""

    def share(tokens):
        block = 4 * tokens * 128 / group  # keys and values in 16 bits, per head of queries
        attend = Operation("attend", flops=2 * tokens**2 * 128)
        ring = []
        for _ in range(7):
            calls = [Call("isend", block, (), 1), Call("irecv", block, (), 7)]
            begin = len(ring)
            ring += [*calls, attend, Wait(begin), Wait(begin + 1)]
        return share_of([*ring, attend])

    line = 2 * F / (group * B)
    assert share(1.01 * line) == pytest.approx(0)
    assert share(0.8 * line) == pytest.approx(7 / 8 * (1 / 0.8 - 1))


def test_experts_of_this_width_send_the_share_that_is_allowed():
    """f = 4 F / (9 s B): tokens go and come, forward and backward; a gated perceptron.

    Almost all of them go away, as on many ranks: the group is counted as 7 of 8.
    """
    width, inner, tokens = 4096, 8192, 1024
    there = Call("all_to_all_single", 2 * width * tokens, tuple(range(8)))
    kernel = Operation("expert", flops=6 * width * inner * tokens)
    events = []
    for times in (1, 2):  # backward computes twice as much
        for event in (there, *[kernel] * times, there):
            events.append(event)
            if isinstance(event, Call):
                events.append(Wait(len(events) - 1))
    share = share_of(events) * 8 / 7
    assert inner == pytest.approx(4 * F / (9 * share * B))


def test_the_pages_have_these_numbers():
    """Of H100s: tokens, ranks, a block, an expert."""
    assert 2050 < F / B < 2150  # "2,100 by NVLink"
    nic = H100S.between.bandwidth
    assert round(F / nic, -2) == 18_800 and round(F / (8 * nic), -1) == 2350
    ranks = [1 + 4.5 * 0.3 * width * B / F for width in (4096, 16_384)]
    assert [2 ** int(math.log2(t)) for t in ranks] == [2, 8]
    assert round(2 * F / B, -2) == 4200 and round(2 * F / (4 * B), -1) == 1040
    assert round(4 * F / (9 * 0.1 * B), -2) == 9300
