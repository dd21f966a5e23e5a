"""The tape beside the formulas on the same plan: a part of Llama 3, sharded by FSDP."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from mgpu_tutorial.instruments.price import price
from mgpu_tutorial.instruments.price.machine import (
    call_seconds,
    machine_of,
    operation_seconds,
)
from mgpu_tutorial.instruments.price.models import llama
from mgpu_tutorial.instruments.price.tape import Call, Operation
from mgpu_tutorial.lab import span
from mgpu_tutorial.shared.cost_model.links import Link
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS
from mgpu_tutorial.shared.cost_model.plans import Model, Plan, memory_of
from mgpu_tutorial.shared.cost_model.step import data_seconds, micro_batch_seconds
from tests.instruments.price.test_tape import preloaded  # noqa: F401

MODEL = Model(4, 2048, 16, 2048, 16_384, 4, 8192, gated=True, tied=False)


def train(rank, world_size):
    torch.set_default_dtype(torch.bfloat16)
    model = llama(4, 2048, 16, 8192, 4, 16_384, 2048)
    for part in model:
        fully_shard(part)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.zeros(4, 2048, dtype=torch.long)
    for _ in range(2):
        with span("step"):
            cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("ranks", [8, 32])
def test_products_and_messages_are_those_of_22(ranks):
    plan = Plan(dp=ranks, zero=3, micro_batch=4, recompute="none", gradient_bytes=2)
    without_latency = {
        name: Link(0, getattr(CLUSTERS["H100"], name).bandwidth)
        for name in ("inside", "between")
    }
    cluster = CLUSTERS["H100"]._replace(**without_latency)
    inside, between = cluster.reached()
    machine = machine_of(f"{ranks} x H100")._replace(inside=inside, between=between)
    found = price(train, ranks, machine=machine)
    events = found.tapes[0].events
    products = [e for e in events if isinstance(e, Operation) and e.flops]
    parts = micro_batch_seconds(MODEL, cluster, plan)
    seconds = sum(operation_seconds(event, machine) for event in products)
    assert seconds == pytest.approx(parts["matmul"], rel=0.01)
    calls = sum(call_seconds(e, 0, machine) for e in events if isinstance(e, Call))
    # the formulas gather embedding and head with the layers, and leave out the norms
    assert calls == pytest.approx(data_seconds(MODEL, cluster, plan, 1), rel=0.01)
    # sharded parameters in 16 bits; here AdamW's moments are in 16 bits too
    parameters = found.memory()[-1][1]["parameters"]
    assert parameters == pytest.approx(memory_of(MODEL, plan, 4 * ranks).parameters, rel=0.01)


def test_kernels_between_products_take_longer_than_in_22():
    """Its passes were fitted to fused kernels; PyTorch without a compiler fuses nothing.

    A norm is several kernels on the tape. So is the rotary embedding, which they don't have.
    """
    plan = Plan(dp=8, zero=3, micro_batch=4, recompute="none", gradient_bytes=2)
    found = price(train, 8)
    others = [e for e in found.tapes[0].events if isinstance(e, Operation) and not e.flops]
    taped = sum(operation_seconds(event, found.machine) for event in others)
    parts = micro_batch_seconds(MODEL, CLUSTERS["H100"], plan)
    assert 2 < taped / (parts["elementwise"] + parts["weights"]) < 3
